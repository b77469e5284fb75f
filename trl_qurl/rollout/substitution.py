"""The one place where a name inside TRL is replaced by ours.

TRL looks up its vLLM classes by module name and has no argument for them. A context manager replaces one for the
length of a constructor call and always restores it, so TRL itself never stays changed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def substitute(module: ModuleType, name: str, replacement: Any) -> Iterator[None]:
    """Let `module.name` be `replacement` inside the block; a name that TRL no longer has is an `AttributeError`."""
    original = getattr(module, name)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)
