"""What is kept between runs: quantized checkpoints that servers start from, the demo's pretrained policy."""

import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

CACHE_VARIABLE = "TRL_QURL_CACHE"


def cache_directory() -> Path:
    """The cache: `$TRL_QURL_CACHE`, or `trl-qurl` in the user's cache directory."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "trl-qurl"


def cached(place: Path, make: Callable[[Path], None]) -> Path:
    """Let `make` create a directory, atomically, if it is missing; one process makes it and the others wait.

    Its name must contain everything that its contents depend on.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if not place.exists():
            make(place)
    return place
