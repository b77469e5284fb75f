"""Checkpoint directories that are either complete or absent.

A checkpoint is written beside its final place and renamed when it is complete, so that no reader, and no later run,
ever meets half of one. Tensors are taken from a stream and written in shards; memory holds one shard at a time.
"""

import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trl_qurl.quantization.stream import NamedTensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARD_BYTES = 2 * 1024**3
"""Largest shard. Small enough to be a small part of memory, large enough that few files are opened."""

INDEX_NAME = "model.safetensors.index.json"

UNWRITABLE = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EFBIG,
    errno.EIO,
}
"""What the system says when a directory cannot be written."""


@contextmanager
def new_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """
    Create a directory atomically: yields a temporary one beside it, which takes the name `path` if the block succeeds.

    An existing `path` is replaced: moved aside whole, so that nobody reads it while its files are being removed. If
    the block fails, nothing is left behind and an existing `path` stays as it was.

    Raises:
        OSError: Where the system refused to write, one sentence that names the directory, the reason and the way out,
            whichever library noticed it. Any other error passes as it is.
    """
    final = Path(path)
    draft = final.parent / f".{final.name}-{uuid.uuid4().hex[:8]}"
    replaced = draft.with_name(f"{draft.name}-replaced")
    try:
        draft.mkdir(parents=True)
        yield draft
        if final.exists():
            os.replace(final, replaced)
        os.replace(draft, final)
    except Exception as error:
        reason = _refusal(error)
        if reason is None:
            raise
        raise OSError(
            f"The checkpoint directory {final} cannot be written ({reason}): free space there, or name a writable "
            "directory with enough room (rollout_checkpoint_dir in the config, output_dir of save_quantized, OUT on "
            "the command line)."
        ) from error
    finally:
        for left in (draft, replaced):
            shutil.rmtree(left, ignore_errors=True)


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """
    Refuse to put a quantized checkpoint where something else is.

    A directory may be replaced if it is absent, empty, or a quantized checkpoint itself.

    Raises:
        FileExistsError: It is a file, or a directory with other contents: somebody's model, a run, a home directory.
    """
    place = Path(path)
    if not place.exists() or (place.is_dir() and (not any(place.iterdir()) or _is_quantized_checkpoint(place))):
        return
    found = f"holds {', '.join(sorted(os.listdir(place))[:3])}, ..." if place.is_dir() else "is a file"
    raise FileExistsError(
        f"{place} {found} and would be replaced, but it is not a quantized checkpoint: name a directory that does not "
        "exist yet, an empty one, or an earlier quantized checkpoint."
    )


def _is_quantized_checkpoint(directory: Path) -> bool:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "quantization_config" in config


def write_tensors(named_tensors: NamedTensors, directory: Path, shard_bytes: int = SHARD_BYTES) -> int:
    """
    Write a stream of tensors as `model.safetensors`, or as shards with an index where they exceed `shard_bytes`.

    Args:
        named_tensors: Tensors under their checkpoint names, on any device.
        directory: Existing directory.
        shard_bytes: Size in bytes from which a new shard is begun; about this much host memory is used.

    Returns:
        Bytes of tensor data written.
    """
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    filled = total = 0

    def flush() -> None:
        file_name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, directory / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file_name))
        shard.clear()

    for name, tensor in named_tensors:
        # A copy where the tensor aliases a parameter: adapters may be unmerged, or shards freed, before the flush.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        filled += tensor.nbytes
        total += tensor.nbytes
        if filled >= shard_bytes:
            flush()
            filled = 0
    if shard:
        flush()
    if len(set(weight_map.values())) == 1:
        os.replace(directory / "model-00001.safetensors", directory / "model.safetensors")
    else:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=2))
    return total


def read_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """
    The tensors of a checkpoint, one at a time, as `write_tensors` left them.

    Raises:
        FileNotFoundError: If the directory holds no weights.
    """
    shards = sorted(directory.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(
            f"{directory} holds no .safetensors file: it is not a checkpoint this process can see."
        )
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, safetensors' handle is no dictionary
                yield name, file.get_tensor(name)


def tensor_shapes(directory: Path) -> dict[str, list[int]]:
    """Shapes of a checkpoint's tensors by name; only the files' headers are read."""
    shapes = {}
    for shard in directory.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as file:
            shapes.update({name: file.get_slice(name).get_shape() for name in file.keys()})  # noqa: SIM118
    return shapes


def write_config(model: "PreTrainedModel", directory: Path, quantization: dict | None) -> None:
    """Write the model's `config.json` with the given `quantization_config` entry; its config object is left alone."""
    contents = model.config.to_dict()
    contents["architectures"] = model.config.architectures or [type(model).__name__]
    if quantization is not None:
        contents["quantization_config"] = quantization
    contents.pop("_name_or_path", None)
    text = json.dumps(contents, indent=2, sort_keys=True, default=str)
    (directory / "config.json").write_text(text + "\n")


def _refusal(error: Exception) -> str | None:
    """Why the system would not write, if that is what the error says; `None` for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None:  # safetensors and tokenizers raise errors of their own around the system's
        found = re.search(r"\(os error (\d+)\)|code: (\d+)", str(error))
        number = int(found[1] or found[2]) if found else None
    return os.strerror(number).lower() if number in UNWRITABLE else None
