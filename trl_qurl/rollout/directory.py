"""The directory through which a run hands checkpoints to its engine.

It lives as long as the run: in memory where there is room, readable by this user only, removed at the end. A run that
was killed cannot clean up after itself, so the next one does: a lock, which the system releases with its process,
tells which directories nobody owns.

Its name is the same for every run, unless several run at once. vLLM makes the path of a model part of the key of its
cache of compiled graphs, so with a new name each start would compile again.
"""

import errno
import itertools
import os
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object
from filelock import FileLock, Timeout

from trl_qurl.quantization.checkpoint import CheckpointWriter
from trl_qurl.quantization.stream import NamedTensors
from trl_qurl.rollout.settings import RolloutSettings

Write = Callable[[NamedTensors, Path], None]

PREFIX = "trl-qurl-"
LOCK_NAME = "owner.lock"


class CheckpointDirectory:
    """A new directory for this run's checkpoints, removed with the object, by `remove`, or when the process ends.

    Memory (`/dev/shm`) is preferred, since these files are written and read at every sync; where it is missing or too
    small (containers often give it 64 MB), the system's temporary directory is used, unless another parent is
    requested. One that cannot be written or has too little space is an `OSError`.
    """

    def __init__(self, requested: str | None, bytes_needed: int) -> None:
        self.path, lock = _create(requested, bytes_needed)
        self.remove = weakref.finalize(self, _remove_own, self.path, lock, os.getpid())


class CheckpointFolder:
    """The directory as every process of a run uses it: one process writes, all know the path and wait for each other.

    One process writes for a server, and one on each node for its own engines.
    """

    def __init__(
        self, accelerator: Accelerator, settings: RolloutSettings, writer: CheckpointWriter, bytes_needed: int
    ) -> None:
        self._accelerator = accelerator
        self._writer = writer
        self.uses_llmcompressor = settings.weight_sync == "llmcompressor"
        self.is_writer = accelerator.is_main_process if settings.is_served else accelerator.is_local_main_process
        self._owned = CheckpointDirectory(settings.checkpoint_dir, bytes_needed) if self.is_writer else None
        source = 0 if settings.is_served else accelerator.process_index - accelerator.local_process_index
        self.path: Path = gather_object([self._owned and self._owned.path])[source]

    def write(self, name: str, rollout_tensors: NamedTensors, write: Write | None = None) -> Path:
        """Write a checkpoint of tensors that are in its format already. A collective operation.

        What is no checkpoint of the model's is written by `write`, which is given the tensors and the directory.
        """
        path = self.path / name
        if self.is_writer:
            (write or self._writer.write)(rollout_tensors, path)
        else:
            deque(rollout_tensors, maxlen=0)
        self._accelerator.wait_for_everyone()
        return path

    def write_with_llmcompressor(self, name: str, parameters: NamedTensors) -> Path:
        """Let llm-compressor make a checkpoint from full-precision parameters."""
        self._writer.quantize(parameters, self.path / name, "llmcompressor")
        return self.path / name

    def remove(self, name: str) -> None:
        """Remove a checkpoint, if there is one, once no process reads it any more. A collective operation."""
        self._accelerator.wait_for_everyone()
        if self.is_writer:
            shutil.rmtree(self.path / name, ignore_errors=True)

    def drop_weights(self, name: str) -> None:
        """Remove the weights of a checkpoint that the engine has loaded: the directory may be in memory."""
        if self.is_writer:
            for weights in (self.path / name).glob("*.safetensors"):
                weights.unlink()


def _create(requested: str | None, bytes_needed: int) -> tuple[Path, FileLock]:
    """A new directory in the first parent that has room, and the lock that its owner holds."""
    parents = [Path(requested)] if requested else [Path("/dev/shm"), Path(tempfile.gettempdir())]
    reason = ""
    for parent in parents:
        try:
            if requested:
                parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(parent)
            free = shutil.disk_usage(parent).free
            if free >= bytes_needed:
                return _own_first_free(parent)
            reason = f"{free / 1e9:.3g} GB are free and {bytes_needed / 1e9:.3g} GB are needed"
        except OSError as error:
            reason = error.strerror or str(error)
    raise OSError(
        f"No room for the rollout engine's checkpoint in {' or '.join(map(str, parents))} ({reason}): set "
        "rollout_checkpoint_dir to a writable directory with enough space."
    )


def _own_first_free(parent: Path) -> tuple[Path, FileLock]:
    """A new directory with the lowest number that no run of this user has, and its lock.

    It gets its name when its lock is held: a run that found it before would take it for abandoned.
    """
    draft = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))
    lock = FileLock(draft / LOCK_NAME)
    with suppress(NotImplementedError, OSError):  # no locks on this file system, so no other run removes it
        lock.acquire(blocking=False)
    (draft / LOCK_NAME).touch()
    for number in itertools.count():
        path = parent / f"{PREFIX}{os.getuid()}-{number}"
        try:
            draft.rename(path)  # not onto a directory with a lock in it
            return path, lock
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                _remove(draft, lock)
                raise
    raise AssertionError("there is always another number")


def _remove_abandoned(parent: Path) -> None:
    """Remove what killed runs of this user left in `parent`. Best effort: never a reason not to start."""
    for lock_file in parent.glob(f"{PREFIX}*/{LOCK_NAME}"):  # one without a lock is just being created
        lock = FileLock(lock_file)
        try:
            found = lock_file.stat()
            lock.acquire(blocking=False)
            is_same = os.path.samestat(found, lock_file.stat())
        except (Timeout, OSError, NotImplementedError):
            continue  # in use, somebody else's, or on a file system without locks
        if is_same:
            _remove(lock_file.parent, lock)
        else:  # its run has just ended, and another one has the name now
            lock.release()


def _remove_own(directory: Path, lock: FileLock, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork of it that ends, where the same is called
        _remove(directory, lock)


def _remove(directory: Path, lock: FileLock) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    lock.release()
