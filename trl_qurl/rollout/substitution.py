"""The one place where a name inside TRL is exchanged for ours.

TRL looks its vLLM classes up by module name and offers no argument for them. A context manager puts ours in their
place for the length of one constructor call and always takes it back, so TRL itself is never left changed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def substitute(module: ModuleType, name: str, replacement: Any) -> Iterator[None]:
    """
    Let `module.name` be `replacement` inside the block.

    Raises:
        AttributeError: If the module has no such name, so that a renamed class cannot pass unnoticed.
    """
    original = getattr(module, name)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)
