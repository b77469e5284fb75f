"""Checkpoint directories that are either complete or absent, so readers never see a partial one.

Tensors come from a stream and are written in shards; memory holds one shard at a time. A cache
keeps some directories.
"""

import fcntl
import glob
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trl_qurl.paths import home_advice
from trl_qurl.quantization.checkpoint_form import NamedTensors
from trl_qurl.signals import exits_on_signals

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CACHE_VARIABLE = "TRL_QURL_CACHE"


@contextmanager
def new_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Create a directory atomically.

    The block fills a temporary one, which replaces `path` if the block succeeds. If it fails, or
    SIGTERM ends the process, nothing is left behind, and an existing `path` stays as it was. The
    next call removes what a killed process left. Raises `OSError` if the system refuses to write,
    also where safetensors noticed.
    """
    final = Path(path)
    unique = uuid.uuid4().hex[:8]
    tmp = final.parent / f".{final.name}-{_boot()}-{unique}"
    new = tmp.with_name(f"{tmp.name}-new")
    replaced = tmp.with_name(f"{tmp.name}-replaced")
    lock: int | None = None
    with exits_on_signals():
        try:
            remove_abandoned(final.parent, final.name)
            new.mkdir(parents=True)
            with suppress(OSError):  # a file system without locks: then nobody removes it either
                lock = _lock(new)
            os.replace(new, tmp)
            yield tmp
            if final.exists():
                os.replace(final, replaced)
            os.replace(tmp, final)
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"The checkpoint directory {final} cannot be written ({error}). If it lacks space "
                "or permissions, free space there, or choose another directory "
                "(rollout_checkpoint_dir in the config, output_dir of save_quantized, OUT on the "
                f"command line, {CACHE_VARIABLE} in the environment for the cache of `trl-qurl "
                "serve`)."
            ) from error
        finally:
            shutil.rmtree(new, ignore_errors=True)
            _discard(tmp, final)
            if lock is not None:
                os.close(lock)


def remove_abandoned(parent: Path, name: str | None = None) -> None:
    """Remove what killed processes left of new directories in `parent`; of all, or of this name.

    A process holds a lock on its directory. What is from before a restart of this machine stays,
    and what is of other machines, because some network file systems do not enforce a lock between
    machines.
    """
    names = "*" if name is None else glob.escape(name)
    for path in parent.glob(f".{names}-{_boot()}-{'[0-9a-f]' * 8}*"):
        tmp = path.with_name(path.name.removesuffix("-replaced"))
        with suppress(OSError):  # of a process that runs, or removed in the meantime
            lock = _lock(tmp if tmp.exists() else path)
            final = tmp.name.removeprefix(".").rsplit("-", 2)[0]
            _discard(tmp, parent / final)
            os.close(lock)


def _discard(tmp: Path, final: Path) -> None:
    """Remove a temporary directory, and the one that it replaced.

    Restore that one if nothing has taken its place.
    """
    replaced = tmp.with_name(f"{tmp.name}-replaced")
    if replaced.exists() and not final.exists():
        os.replace(replaced, final)
    shutil.rmtree(tmp, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)


def _boot() -> str:
    """Return an identifier of this machine since its last start, the same in all containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


def _lock(directory: Path) -> int:
    """Lock a directory until its descriptor, which is returned, is closed.

    Raises `OSError` if another process holds the lock.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Raise `FileExistsError` if `path` holds something other than a quantized checkpoint.

    Raises `ValueError` for a `~`, which would become the name of a directory.
    """
    path = Path(path)
    if path.parts[:1] == ("~",):
        raise ValueError(f"The checkpoint cannot be written to {path}.{home_advice(path)}")
    if not path.exists():
        return
    contents = "is a file"
    if path.is_dir():
        names = sorted(os.listdir(path))
        if not names:
            return
        config = path / "config.json"
        if config.is_file() and '"quantization_config"' in config.read_text(encoding="utf-8"):
            return
        contents = f"holds {', '.join(names[:3])}, ..."
    raise FileExistsError(
        f"{path} {contents} and would be replaced, but it is not a quantized checkpoint: choose a "
        "directory that does not exist yet, an empty one, or an earlier quantized checkpoint."
    )


def write_tensors(
    named_tensors: NamedTensors, directory: Path, shard_bytes: int = 2 * 1024**3
) -> None:
    """Write tensors as `model.safetensors`, or as shards with an index.

    This uses about `shard_bytes` of memory.
    """
    weight_map: dict[str, str] = {}  # the file of each tensor
    total = 0
    count = 0
    for count, shard in enumerate(_shards(named_tensors, shard_bytes), 1):
        file_name = f"model-{count:05d}.safetensors"
        save_file(shard, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file_name)
        total += sum(tensor.nbytes for tensor in shard.values())
        shard.clear()  # before the next one grows
    if count == 1:
        os.replace(directory / "model-00001.safetensors", directory / "model.safetensors")
    else:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _shards(named_tensors: NamedTensors, shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield copies of tensors in host memory, about `shard_bytes` at a time."""
    shard: dict[str, torch.Tensor] = {}
    filled = 0
    for name, tensor in named_tensors:
        # Copy now: before this is written, the parameter's shards may be freed.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        filled += tensor.nbytes
        if filled >= shard_bytes:
            yield shard
            shard = {}
            filled = 0
    if shard:
        yield shard


def read_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint one at a time.

    Raises `FileNotFoundError` if there are none.
    """
    shards = sorted(directory.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(
            f"{directory} contains no .safetensors file that this process can see."
        )
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, safetensors' handle is not a dictionary
                yield name, file.get_tensor(name)


def tensor_shapes(directory: Path) -> dict[str, list[int]]:
    """Read the shapes of a checkpoint's tensors, by name, from the headers of its files."""
    shapes = {}
    for shard in directory.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                shapes[name] = file.get_slice(name).get_shape()
    return shapes


def write_config(model: "PreTrainedModel", directory: Path, quantization: dict | None) -> None:
    """Write the model's `config.json` with a `quantization_config` entry.

    The model's config object does not change. Copies classes that came with the checkpoint
    (`trust_remote_code`) next to it, where `auto_map` refers to them.
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
    (directory / "config.json").write_text(
        json.dumps(contents, indent=2, sort_keys=True, default=str) + "\n"
    )


def set_dtype(directory: Path, dtype: torch.dtype | None) -> None:
    """Have float32 weights loaded in the type that autocast rounded them to.

    In training, no pass saw the rest.
    """
    path = directory / "config.json"
    if dtype is None or not path.exists():  # an adapter has no config.json
        return
    contents = json.loads(path.read_text(encoding="utf-8"))
    for config in (contents, contents.get("text_config") or {}):
        if config.get("dtype") in ("float32", None):
            config["dtype"] = str(dtype).removeprefix("torch.")
    text = json.dumps(contents, indent=2) + "\n"
    write_atomically(path, lambda tmp: tmp.write_text(text, encoding="utf-8"))


def cache_directory() -> Path:
    """Return the cache: `$TRL_QURL_CACHE`, or `trl-qurl` in the user's cache directory."""
    override = os.environ.get(CACHE_VARIABLE)
    if override:
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "trl-qurl"


def cached(path: Path, make: Callable[[Path], None]) -> Path:
    """Create a directory with `make` if it is missing; one process makes it while the others wait.

    `make` must be atomic, and the name must encode everything that the contents depend on.
    """
    lock = FileLock(f"{path}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        advice = f"free space there, or set {CACHE_VARIABLE} to a writable directory"
        raise OSError(f"The cache {path.parent} cannot be written ({error}): {advice}.") from error
    try:
        remove_abandoned(path.parent)
        if not path.exists():
            make(path)
    finally:
        lock.release()
    return path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a temporary file, which then replaces `path`."""
    tmp = path.with_suffix(".tmp")
    write(tmp)
    tmp.replace(path)
