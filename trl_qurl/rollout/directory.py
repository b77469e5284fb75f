"""The directory in which a run hands checkpoints to its engine.

It lives as long as the run: in memory where there is room, private to the user, gone at the end. A run that was killed
can't clean up after itself; the next one does. A lock, which the system releases with its process, tells it which
directories nobody owns any more.

Its name is the same for every run, unless several run at once: vLLM takes the path of a model into the key of its
cache of compiled graphs, so that with a new name each start would compile anew and leave one more entry behind.
"""

import itertools
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from filelock import FileLock, Timeout

PREFIX = "trl-qurl-"
LOCK_NAME = "owner.lock"


class CheckpointDirectory:
    """
    A new directory for this run's checkpoints. Removed when the object is, or at the end of the process.

    Memory (`/dev/shm`) is preferred, since these files are written and read at every sync; where it is missing or too
    small (containers often give it 64 MB), the system's temporary directory is used.

    Args:
        requested: Parent directory the user asked for, or `None` to choose.
        bytes_needed: What has to fit.

    Attributes:
        path: The directory, which only this user can read.

    Raises:
        OSError: `requested` cannot be created or written, or too little space is left.
    """

    def __init__(self, requested: str | None, bytes_needed: int) -> None:
        parents = [Path(requested)] if requested else [Path("/dev/shm"), Path(tempfile.gettempdir())]
        self.path, lock = _create_owned(parents, bytes_needed, make_parent=requested is not None)
        self._finalizer = weakref.finalize(self, _remove, self.path, lock)

    def remove(self) -> None:
        """Remove the directory now."""
        self._finalizer()


def _create_owned(parents: list[Path], bytes_needed: int, make_parent: bool) -> tuple[Path, FileLock]:
    while True:
        path = _create(parents, bytes_needed, make_parent)
        lock = _owner_lock(path)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            pass  # another run looked in between making it and locking it, and is removing it
        except (OSError, NotImplementedError):
            return path, lock  # no locks on this file system: nobody will take it for abandoned either
        else:
            if path.exists():
                return path, lock


def _create(parents: list[Path], bytes_needed: int, make_parent: bool) -> Path:
    reason = "no directory was found"
    for parent in parents:
        try:
            if make_parent:
                parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(parent)
            free = shutil.disk_usage(parent).free
            if free >= bytes_needed:
                return _first_free(parent)
            reason = f"{free / 1e9:.3g} GB are free and {bytes_needed / 1e9:.3g} GB are needed"
        except OSError as error:
            reason = error.strerror or str(error)
    raise OSError(
        f"No room for the rollout engine's checkpoint in {' or '.join(map(str, parents))} ({reason}): set "
        "rollout_checkpoint_dir to a writable directory with enough space."
    )


def _first_free(parent: Path) -> Path:
    """A new directory with the lowest number that no run of this user has."""
    for number in itertools.count():
        path = parent / f"{PREFIX}{os.getuid()}-{number}"
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return path
    raise AssertionError("numbers do not end")


def _remove_abandoned(parent: Path) -> None:
    """Remove what killed runs of this user left in `parent`. Best effort: never a reason not to start."""
    for left in parent.glob(f"{PREFIX}*"):
        lock = _owner_lock(left)
        try:
            if not Path(lock.lock_file).exists():
                continue  # another run is just creating it
            lock.acquire(blocking=False)
        except (Timeout, OSError, NotImplementedError):
            continue  # in use, somebody else's, or on a file system without locks
        _remove(left, lock)


def _owner_lock(directory: Path) -> FileLock:
    return FileLock(directory / LOCK_NAME)


def _remove(directory: Path, lock: FileLock) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    lock.release()
