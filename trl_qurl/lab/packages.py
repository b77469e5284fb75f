"""Optional packages, which the extras of this project bring."""

from __future__ import annotations

from importlib.util import find_spec


def require(purpose: str, *packages: str, extra: str) -> None:
    """Fail at once, with the way to install them, if packages are missing."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ImportError(f"{purpose} needs {' and '.join(missing)}: run `pip install 'trl-qurl[{extra}]'`.")
