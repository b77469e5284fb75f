"""The only place where this package replaces a name inside another library.

TRL looks up its vLLM classes by module name, and whether to score a rollout on the trainer.
llm-compressor asks torch whether there are other processes. None of these is an argument. A context
manager replaces one for the duration of a call and always restores it, so no library stays patched.
docs/upstream.md has the pull request that would end each use in TRL.
"""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def substitute(owner: object, name: str, replacement: object) -> Iterator[None]:
    """Replace `owner.name` inside the block.

    Raises `AttributeError` if TRL no longer defines the name.
    """
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
