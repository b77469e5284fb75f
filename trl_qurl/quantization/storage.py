"""Checkpoint directories that are either complete or absent.

A checkpoint is written beside its final place and renamed when it is complete, so that no reader, and no later run,
ever meets half of one. Tensors are taken from a stream and written in shards; memory holds one shard at a time.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trl_qurl.quantization.weights import NamedTensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARD_BYTES = 2 * 1024**3
"""Largest shard. Small enough to be a small part of memory, large enough that few files are opened."""

INDEX_NAME = "model.safetensors.index.json"


@contextmanager
def new_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """
    Create a directory atomically: yields a private temporary one, which takes the name `path` if the block succeeds.

    An existing `path` is replaced. If the block fails, nothing is left behind and an existing `path` stays as it was.

    Raises:
        OSError: One sentence that names the directory, what failed and the way out, whichever library noticed it.
    """
    final = Path(path)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    except OSError as error:
        raise _unwritable(final, error) from error
    try:
        yield draft
        if final.exists():
            shutil.rmtree(final)
        os.replace(draft, final)
    except (OSError, SafetensorError) as error:
        raise _unwritable(final, error) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


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


def write_config(model: "PreTrainedModel", directory: Path, quantization: dict | None) -> None:
    """Write the model's `config.json` with the given `quantization_config` entry; its config object is left alone."""
    contents = model.config.to_dict()
    contents["architectures"] = model.config.architectures or [type(model).__name__]
    if quantization is not None:
        contents["quantization_config"] = quantization
    contents.pop("_name_or_path", None)
    text = json.dumps(contents, indent=2, sort_keys=True, default=str)
    (directory / "config.json").write_text(text + "\n")


def _unwritable(path: Path, error: Exception) -> OSError:
    reason = str(error).strip() or type(error).__name__
    if "os error 28" in reason or "code: 28" in reason or getattr(error, "errno", None) == 28:
        reason = "no space left on the device"
    return OSError(
        f"The checkpoint directory {path} cannot be written ({reason}): free space there, or name a writable "
        "directory with enough room (rollout_checkpoint_dir in the config, OUT on the command line)."
    )


def working_directory(requested: str | None, bytes_needed: int) -> Path:
    """
    Create a private directory for checkpoints that live as long as the run.

    Memory (`/dev/shm`) is preferred, since these files are written and read at every step; where it is missing or too
    small (containers often give it 64 MB), the system's temporary directory is used.

    Args:
        requested: Parent directory the user asked for, or `None` to choose.
        bytes_needed: What has to fit.

    Returns:
        A new empty directory that only this user can read.

    Raises:
        OSError: `requested` cannot be created or written, or too little space is left.
    """
    parents = [Path(requested)] if requested else [Path("/dev/shm"), Path(tempfile.gettempdir())]
    reason = "no directory was found"
    for parent in parents:
        try:
            if requested:
                parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(parent).free
            if free >= bytes_needed:
                return Path(tempfile.mkdtemp(prefix="trl-qurl-", dir=parent))
            reason = f"{free / 1e9:.3g} GB are free and {bytes_needed / 1e9:.3g} GB are needed"
        except OSError as error:
            reason = error.strerror or str(error)
    raise OSError(
        f"No room for the rollout engine's checkpoint in {' or '.join(map(str, parents))} ({reason}): set "
        "rollout_checkpoint_dir to a writable directory with enough space."
    )
