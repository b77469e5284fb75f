"""Checkpoint directories that are either complete or absent, so readers never see a partial one.

Tensors come from a stream and are written in shards; memory holds one shard at a time. A cache keeps some of them.
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trl_qurl.quantization.checkpoint_form import NamedTensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CACHE_VARIABLE = "TRL_QURL_CACHE"


@contextmanager
def new_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Create a directory atomically: the block fills a temporary one, which replaces `path` if the block succeeds.

    If it fails, nothing is left behind, and an existing `path` stays as it was. Raises `OSError` if the system refuses
    to write, also where safetensors noticed.
    """
    final = Path(path)
    tmp = final.parent / f".{final.name}-{uuid.uuid4().hex[:8]}"
    old = tmp.with_name(f"{tmp.name}-replaced")
    try:
        tmp.mkdir(parents=True)
        yield tmp
        if final.exists():
            os.replace(final, old)
        os.replace(tmp, final)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"The checkpoint directory {final} cannot be written ({error}). If it lacks space or permissions, free "
            "space there, or choose another directory (rollout_checkpoint_dir in the config, output_dir of "
            "save_quantized, OUT on the command line)."
        ) from error
    finally:
        for leftover in (tmp, old):
            shutil.rmtree(leftover, ignore_errors=True)


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Raise `FileExistsError` unless `path` does not exist, is an empty directory, or holds a quantized checkpoint."""
    path = Path(path)
    config = path / "config.json"
    is_checkpoint = config.is_file() and '"quantization_config"' in config.read_text(encoding="utf-8")
    if not path.exists() or is_checkpoint or (path.is_dir() and not any(path.iterdir())):
        return
    contents = f"holds {', '.join(sorted(os.listdir(path))[:3])}, ..." if path.is_dir() else "is a file"
    raise FileExistsError(
        f"{path} {contents} and would be replaced, but it is not a quantized checkpoint: choose a directory that does "
        "not exist yet, an empty one, or an earlier quantized checkpoint."
    )


def write_tensors(named_tensors: NamedTensors, directory: Path, shard_bytes: int = 2 * 1024**3) -> None:
    """Write tensors as `model.safetensors`, or as shards with an index; this uses about `shard_bytes` of memory."""
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    filled = total = 0

    def flush() -> None:
        file_name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, directory / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file_name))
        shard.clear()

    for name, tensor in named_tensors:
        # Copy now: before this is written, the parameter's shards may be freed.
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
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def read_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint one at a time; raises `FileNotFoundError` if it has none."""
    shards = sorted(directory.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"{directory} contains no .safetensors file that this process can see.")
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, safetensors' handle is not a dictionary
                yield name, file.get_tensor(name)


def tensor_shapes(directory: Path) -> dict[str, list[int]]:
    """Read the shapes of a checkpoint's tensors, by name, from the headers of its files."""
    shapes = {}
    for shard in directory.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as file:
            shapes.update({name: file.get_slice(name).get_shape() for name in file.keys()})  # noqa: SIM118
    return shapes


def write_config(model: "PreTrainedModel", directory: Path, quantization: dict | None) -> None:
    """Write the model's `config.json` with a `quantization_config` entry, without touching its config object.

    Copies classes that came with the checkpoint (`trust_remote_code`) next to it, where `auto_map` refers to them.
    """
    from transformers.dynamic_module_utils import custom_object_save

    contents = model.config.to_dict()
    remote_objects = [item for item in (model.config, model) if item.is_remote_code()]
    for item in remote_objects:
        custom_object_save(item, directory, contents)
    if not remote_objects:  # the class is transformers' own, so its name is enough
        contents.pop("auto_map", None)
    contents.pop("_name_or_path", None)
    contents["architectures"] = model.config.architectures or [type(model).__name__]
    if quantization is not None:
        contents["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(contents, indent=2, sort_keys=True, default=str) + "\n")


def set_dtype(directory: Path, dtype: torch.dtype | None) -> None:
    """Have float32 weights loaded in the type that autocast rounded them to: in training, no pass saw the rest."""
    path = directory / "config.json"
    if dtype is not None and path.exists():  # an adapter has none
        contents = json.loads(path.read_text(encoding="utf-8"))
        for config in (contents, contents.get("text_config") or {}):
            if config.get("dtype") in ("float32", None):
                config["dtype"] = str(dtype).removeprefix("torch.")
        (tmp := path.with_suffix(".tmp")).write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
        tmp.replace(path)


def cache_directory() -> Path:
    """Return the cache: `$TRL_QURL_CACHE`, or `trl-qurl` in the user's cache directory."""
    if override := os.environ.get(CACHE_VARIABLE):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "trl-qurl"


def cached(path: Path, make: Callable[[Path], None]) -> Path:
    """Create a directory with `make` if it is missing; one process makes it while the others wait.

    `make` must be atomic, and the name must encode everything that the contents depend on.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if not path.exists():
            make(path)
    return path
