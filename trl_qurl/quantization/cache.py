"""What is made once and kept between runs: quantized starting checkpoints, the demo's warm-started policy."""

import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

CACHE_VARIABLE = "TRL_QURL_CACHE"


def cache_directory() -> Path:
    """`$TRL_QURL_CACHE`, or `trl-qurl` in the user's cache directory."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "trl-qurl"


def cached(place: Path, make: Callable[[Path], None]) -> Path:
    """
    A directory that is made if it is not there yet.

    Processes that want it at once wait for the first of them instead of making it twice.

    Args:
        place: The directory. Its name says all that its contents depend on.
        make: Called with `place` where it does not exist; must create it in one step, complete.

    Returns:
        `place`.

    Raises:
        OSError: The cache cannot be written.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if not place.exists():
            make(place)
    return place
