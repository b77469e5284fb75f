"""What rollouts cost this process, in seconds, bytes and tokens."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Self


@dataclass
class RolloutCost:
    """The cost of rollouts since it was last taken, and what was measured on the way."""

    quantize_s: float = 0.0  # gathering and rounding
    sync_s: float = 0.0  # whole syncs; includes `quantize_s`, digests and a fingerprint
    check_s: float = 0.0  # digests on both sides, fingerprints, and completions scored for a proof
    sent_bytes: int = 0  # total size of the tensors made for the engine
    recoveries: int = 0  # from server faults
    generate_s: float = 0.0
    tokens: int = 0  # of completions
    metrics: dict[str, float] = field(default_factory=dict)  # others, by name

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes to the field of this name, unless it raises."""
        started = time.perf_counter()
        yield
        setattr(self, name, getattr(self, name) + time.perf_counter() - started)

    @property
    def is_zero(self) -> bool:
        """Whether the engine was not used."""
        return self == type(self)()

    def take(self) -> Self:
        """Return the cost so far, and begin again at zero."""
        taken = replace(self)
        vars(self).update(vars(type(self)()))
        return taken
