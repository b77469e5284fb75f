"""Files and directories that are complete or absent, private ones, and the lock of those in use."""

import fcntl
import glob
import itertools
import os
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock
from safetensors import SafetensorError

from trl_qurl.signals import exits_on_signals

CACHE_VARIABLE = "TRL_QURL_CACHE"


def lock(path: Path, kind: int = fcntl.LOCK_EX) -> int:
    """Lock a directory, or a file, which is created, until the returned descriptor is closed.

    The system closes it when the process ends, however it ends. Raises `BlockingIOError` while
    another process holds the lock, and `OSError` on a file system without locks.
    """
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    opened = os.open(path, flags, 0o600)
    try:
        # Not a FileLock: filelock unlocks when Python exits, before a directory is removed.
        fcntl.flock(opened, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        raise
    return opened


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a temporary file, which then replaces `path`."""
    tmp = path.with_suffix(".tmp")
    write(tmp)
    tmp.replace(path)


@contextmanager
def new_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Create a directory atomically.

    The block fills a temporary one, which replaces `path` if the block succeeds. If it fails, or
    SIGTERM ends the process, nothing is left behind, and an existing `path` stays as it was. What a
    killed process left is removed by the next call for the same `path`: of two processes that write
    there at once, the first fails. Raises `OSError` if the system refuses to write, also where
    safetensors noticed.
    """
    final = Path(path)
    prefix = f".{final.name}-new-"
    workplace = final.with_name(f"{prefix}{uuid.uuid4().hex}")
    draft = workplace / "draft"
    replaced = workplace / "replaced"
    with exits_on_signals(), _one_error(final):
        for left in final.parent.glob(f"{glob.escape(prefix)}*"):
            shutil.rmtree(left, ignore_errors=True)
        try:
            draft.mkdir(parents=True)
            yield draft
            if final.exists():
                os.replace(final, replaced)
            os.replace(draft, final)
        finally:
            if replaced.exists() and not final.exists():
                os.replace(replaced, final)
            shutil.rmtree(workplace, ignore_errors=True)


@contextmanager
def _one_error(path: Path) -> Iterator[None]:
    """Say what to do if a directory cannot be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"The directory {path} cannot be written ({error}). If it lacks space or permissions, "
            "free space there, or choose another directory (rollout_checkpoint_dir in the config, "
            f"output_dir of save_quantized, OUT on the command line, {CACHE_VARIABLE} in the "
            "environment for the cache of `trl-qurl serve`)."
        ) from error


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
    with _one_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        waiting = FileLock(f"{path}.lock")
        waiting.acquire()
    try:
        if not path.exists():
            make(path)
    finally:
        waiting.release()
    return path


class PrivateDirectory:
    """A new directory of this process, which only this user can read.

    It is removed with the object, by `remove`, or when the process ends. Memory (`/dev/shm`) is
    preferred, because an engine's files are written and read at every sync. If it is missing or too
    small (containers often give it 64 MB), the system's temporary directory is used, unless another
    parent is requested. Raises `OSError` if the directory is not writable or too small.

    It has the lowest number whose lock file could be locked (`0.lock` for `0`), and only the holder
    of that lock removes it. Lock files stay, so a number always means the same lock. The system
    unlocks it when a process is killed, and the next one then removes the leftovers.

    Numbers, because vLLM includes a model's path in the key of its cache of compiled graphs: a new
    name at each start would trigger another compilation.
    """

    def __init__(self, requested: str | None, bytes_needed: int) -> None:
        parents = [Path("/dev/shm"), Path(tempfile.gettempdir())]
        if requested:
            parents = [Path(requested)]
        reason = ""
        for parent in parents:
            try:
                if requested:
                    parent.mkdir(parents=True, exist_ok=True)
                self.path, opened = _claim(parent, bytes_needed)
                self.remove = weakref.finalize(self, _remove, self.path, opened, os.getpid())
                self.make()
                return
            except OSError as error:
                reason = error.strerror or str(error)
        raise OSError(
            f"No room for the rollout engine's checkpoint in {' or '.join(map(str, parents))} "
            f"({reason}): set rollout_checkpoint_dir to a writable directory with enough space."
        )

    def make(self) -> None:
        """Make the directory, as private as before if a logout or a cleaner has removed it.

        Raises `PermissionError` if another user has made it.
        """
        for path in (self.path.parent, self.path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.lstat().st_uid != os.getuid():
                raise PermissionError(f"{path} belongs to another user")


def _claim(parent: Path, bytes_needed: int) -> tuple[Path, int]:
    """Return the directory with the lowest number not in use, and its lock."""
    # Per boot, because some network file systems do not enforce a lock between machines.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    home = parent / f"trl-qurl-{os.getuid()}-{boot}"
    for lock_file in home.glob("*.lock"):
        with suppress(OSError):  # in use
            _remove(lock_file.with_suffix(""), lock(lock_file), os.getpid())
    free = shutil.disk_usage(parent).free
    if free < bytes_needed:
        raise OSError(f"{free / 1e9:.3g} GB are free and {bytes_needed / 1e9:.3g} GB are needed")
    home.mkdir(mode=0o700, exist_ok=True)
    for number in itertools.count():
        path = home / str(number)
        with suppress(BlockingIOError):  # in use
            opened = lock(path.with_suffix(".lock"))
            shutil.rmtree(path, ignore_errors=True)  # of a process that was killed just now
            return path, opened
    raise AssertionError("there is always another number")


def _remove(path: Path, opened: int, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the owner is exiting
        return
    shutil.rmtree(path, ignore_errors=True)
    fcntl.flock(opened, fcntl.LOCK_UN)  # closing is not enough while a fork has the file open
    os.close(opened)
