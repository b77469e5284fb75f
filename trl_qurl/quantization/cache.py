"""Files kept between runs: quantized checkpoints that servers start from, and the demo's pretrained policy."""

import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

CACHE_VARIABLE = "TRL_QURL_CACHE"


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
