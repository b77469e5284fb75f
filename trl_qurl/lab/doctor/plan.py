"""What is tried, and in which order: one process per entry."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

UNQUANTIZED = "none"


class Job(NamedTuple):
    """A process that tries something.

    Attributes:
        call: Module and function here.
        argument: Of the function: a format.
        lines: Names of the lines that it reports, in order.
        needs_gpu: Whether a CPU is not enough.
        patience: Factor of the time limit; a server needs more of it.
    """

    call: str
    argument: str
    lines: tuple[str, ...]
    needs_gpu: bool = False
    patience: float = 1.0

    def command(self, result: Path) -> list[str]:
        """The command that runs it."""
        return [sys.executable, "-m", "trl_qurl.lab.doctor.worker", self.call, self.argument, str(result)]


LOOK = Job("device.describe", "", ("torch", "gpus", "formats", "division"))
"""What torch sees, which the rest depends on."""


def plan(formats: Sequence[str]) -> list[Job]:
    """All that is to be tried with engines, in order.

    Args:
        formats: Names of the formats; the first one is used wherever one is enough.
    """
    first = formats[0]
    every = [
        Job("training.train_format", name, (f"engine-{name}", f"train-{name}", f"probe-{name}")) for name in formats
    ]
    return [
        *every,
        Job("training.train_padded", first, ("padded",)),
        Job("training.train_with_graphs", first, ("graphs",), needs_gpu=True),
        Job("training.train_asleep", first, ("sleep",), needs_gpu=True),
        Job("training.train_with_fp8_cache", first, ("kv-cache",), needs_gpu=True),
        Job("server.train_with_server", first, ("server",), patience=2),
    ]
