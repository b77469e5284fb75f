"""Optional packages, which are installed by this project's extras."""

from __future__ import annotations

from importlib.util import find_spec


def require(purpose: str, *packages: str, extra: str) -> None:
    """Raise `ImportError` with install instructions if any of the packages is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"{purpose} needs {' and '.join(missing)}: run `pip install 'trl-qurl[{extra}]'`."
        )
