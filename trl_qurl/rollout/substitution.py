"""The one place where a name inside TRL is replaced by ours.

TRL looks up its vLLM classes by module name, and settings on the trainer, without an argument for them. A context
manager replaces one for the length of a call and always restores it, so TRL itself never stays changed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def substitute(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Let `owner.name` be `replacement` inside the block; a name that TRL no longer has is an `AttributeError`."""
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
