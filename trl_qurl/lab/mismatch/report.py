"""Results of `trl-qurl mismatch`, as its JSON file has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trl_qurl.lab.comparison import BASELINE
from trl_qurl.lab.mismatch.statistics import Mismatch


@dataclass(frozen=True)
class Step:
    """A finer format for layers that the engine fuses, or 16 bits."""

    layers: tuple[str, ...]
    format: str  # their new format, `"none"` for 16 bits
    kl: float  # estimate of the KL that this removes, in nats per token
    extra_bytes: int  # growth of the engine's weights


@dataclass(frozen=True)
class Choice:
    """Layers that get finer formats."""

    name: str  # key of the mixed format in the report
    formats: dict[str, str]  # value for `rollout_quantization`
    taken: int  # number of steps taken, the first ones
    steps: tuple[Step, ...]  # all steps, most KL per byte first
    limit: float  # KL that they were chosen for, in nats per token


@dataclass
class Report:
    """Results of a mismatch measurement."""

    model: str  # name or directory from the command line
    settings: dict[str, Any]  # questions, how many answers, layers in full precision
    # by format, `"none"` for a 16-bit engine
    formats: dict[str, Mismatch] = field(default_factory=dict)
    choice: Choice | None = None
    # by format of the key-value cache, with weights in 16 bits
    caches: dict[str, Mismatch] = field(default_factory=dict)

    @property
    def by_kernels(self) -> float:
        """The KL of a 16-bit engine, which kernels alone cause."""
        return self.formats[BASELINE].kl_k3.value
