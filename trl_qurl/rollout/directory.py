"""The directory through which a run passes checkpoints to its engine, readable only by this user.

A run takes the lowest number whose lock file it can lock (`0.lock` for `0`), and only the holder of
that lock creates or removes the directory. No run removes lock files, so a path always means the
same lock. The system releases it when a run is killed, and the next run then removes the leftovers.
A logout (systemd's RemoveIPC) or a cleaner may remove all of it under a run that goes on, which
then makes and locks it again.

Numbers, because vLLM includes a model's path in the key of its cache of compiled graphs: a new name
at each start would trigger another compilation.
"""

import fcntl
import itertools
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object

from trl_qurl.quantization.checkpoint import CheckpointWriter
from trl_qurl.quantization.checkpoint_form import NamedTensors
from trl_qurl.rollout.group import TOGETHER

LOCK_SUFFIX = ".lock"


class CheckpointDirectory:
    """A new directory for this run's checkpoints.

    It is removed with the object, by `remove`, or when the process ends.
    Memory (`/dev/shm`) is preferred, because these files are written and read at every sync. If it
    is missing or too small (containers often give it 64 MB), the system's temporary directory is
    used, unless another parent is requested. Raises `OSError` if the directory is not writable or
    too small.
    """

    def __init__(self, requested: str | None, bytes_needed: int) -> None:
        self.path, lock = _create(requested, bytes_needed)
        self._own(lock)

    def _own(self, lock: int) -> None:
        self._lock = lock
        self.remove = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def restore(self) -> None:
        """Make the directory again, as private as before, if it was removed under this run.

        Raises `OSError` if another run has taken its place since then.
        """
        if not _is_in_place(self.path, self._lock):
            self._lock_again()
        os.utime(self._lock)  # cleaners go by age
        self.path.mkdir(mode=0o700, exist_ok=True)

    def _lock_again(self) -> None:
        home = self.path.parent
        home.parent.mkdir(parents=True, exist_ok=True)
        home.mkdir(mode=0o700, exist_ok=True)
        try:
            lock = _lock(self.path)
        except BlockingIOError:
            raise OSError(
                f"{self.path} was removed under this run, by a logout or a cleaner, and another "
                "run has taken its place: set rollout_checkpoint_dir to a directory that stays, "
                "and resume from the last checkpoint."
            ) from None
        self.remove.detach()
        os.close(self._lock)
        self._own(lock)


class CheckpointFolder:
    """The directory as all processes of a run share it.

    One process writes for a server; for colocated engines, one process on each node writes. All
    know the path, and wait for the writer.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        writer: CheckpointWriter,
        parent: str | None,
        nbytes: int,
        is_served: bool,
    ) -> None:
        self._accelerator = accelerator
        self.writer = writer
        if is_served:
            writing_process = 0
        else:
            writing_process = accelerator.process_index - accelerator.local_process_index
        self.is_writer = accelerator.process_index == writing_process
        self._directory: CheckpointDirectory | None = None

        def create() -> None:
            if self.is_writer:
                self._directory = CheckpointDirectory(parent, nbytes)

        TOGETHER.run(create)
        own_path = None if self._directory is None else self._directory.path
        paths: list[Path] = gather_object([own_path])
        self.path = paths[writing_process]

    def write(
        self,
        name: str,
        rollout_tensors: NamedTensors,
        write: Callable[[NamedTensors, Path], None] | None = None,
    ) -> Path:
        """Write a checkpoint from tensors in its format, or call `write` on them.

        A collective operation.
        """
        path = self.path / name
        save = write or self.writer.write

        def drain() -> None:
            for _ in rollout_tensors:  # collective operations make them
                pass

        def act() -> None:
            if self._directory is None:
                drain()
            else:
                self._directory.restore()
                save(rollout_tensors, path)

        TOGETHER.run(act, join=drain)
        self._accelerator.wait_for_everyone()
        return path

    def remove(self, name: str) -> None:
        """Remove a checkpoint, if it exists, once no process reads it anymore.

        A collective operation.
        """
        self._accelerator.wait_for_everyone()
        if self.is_writer:
            shutil.rmtree(self.path / name, ignore_errors=True)

    def drop_weights(self, name: str) -> None:
        """Remove weights once the engine has loaded them: the directory may be in memory."""
        if self.is_writer:
            for weights in (self.path / name).glob("*.safetensors"):
                weights.unlink()


def _create(requested: str | None, bytes_needed: int) -> tuple[Path, int]:
    """Create a directory in the first parent that has room.

    Returns it and the open lock file of its owner.
    """
    parents = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    if requested:
        parents = [Path(requested)]
    reason = ""
    for parent in parents:
        try:
            if requested:
                parent.mkdir(parents=True, exist_ok=True)
            # Per boot, because some network file systems do not enforce a lock between machines.
            boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
            home = parent / f"trl-qurl-{os.getuid()}-{boot}"
            _remove_abandoned(home)
            free = shutil.disk_usage(parent).free
            if free >= bytes_needed:
                return _claim(home)
            reason = f"{free / 1e9:.3g} GB are free and {bytes_needed / 1e9:.3g} GB are needed"
        except OSError as error:
            reason = error.strerror or str(error)
    raise OSError(
        f"No room for the rollout engine's checkpoint in {' or '.join(map(str, parents))} "
        f"({reason}): set rollout_checkpoint_dir to a writable directory with enough space."
    )


def _claim(home: Path) -> tuple[Path, int]:
    """Create the directory with the lowest number not in use, and return it with its lock."""
    home.mkdir(mode=0o700, exist_ok=True)
    for number in itertools.count():
        path = home / str(number)
        with suppress(BlockingIOError):  # in use by another run
            lock = _lock(path)
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(mode=0o700)
            return path, lock
    raise AssertionError("there is always another number")


def _lock(directory: Path) -> int:
    """Lock a directory's lock file and return it, open.

    Raises `BlockingIOError` while a run holds it.
    """
    lock = os.open(f"{directory}{LOCK_SUFFIX}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(lock).st_uid != directory.parent.lstat().st_uid:
            raise PermissionError(f"{directory.parent} belongs to another user")
        # Not a FileLock: filelock unlocks when Python exits, before the directory is removed.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _is_in_place(directory: Path, lock: int) -> bool:
    """Return whether a directory's lock file is still the open one, which its owner holds."""
    try:
        return os.path.samestat(os.stat(f"{directory}{LOCK_SUFFIX}"), os.fstat(lock))
    except FileNotFoundError:
        return False


def _remove_abandoned(home: Path) -> None:
    """Remove the directories of this user's killed runs. Best effort; failures are ignored."""
    for lock_file in home.glob(f"*{LOCK_SUFFIX}"):
        with suppress(OSError):
            directory = lock_file.with_suffix("")
            _remove(directory, _lock(directory), os.getpid())


def _remove(directory: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the owner is exiting
        return
    if _is_in_place(directory, lock):  # else it may be another run's by now
        shutil.rmtree(directory, ignore_errors=True)
    fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough while a fork has the file open
    os.close(lock)
