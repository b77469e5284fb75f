"""The tests to run, in order; each runs in a separate process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

UNQUANTIZED = "none"


class Job(NamedTuple):
    """A test in a separate process.

    Attributes:
        call: Module and function in this package.
        argument: Argument of the function: a format.
        lines: Names of the lines it reports, in order.
        needs_gpu: True if the test requires a GPU.
        patience: Factor on the time limit; a server takes longer.
    """

    call: str
    argument: str
    lines: tuple[str, ...]
    needs_gpu: bool = False
    patience: float = 1.0

    def command(self, result: Path) -> list[str]:
        """Return the command that runs the test."""
        return [sys.executable, "-m", "trl_qurl.lab.doctor.worker", self.call, self.argument, str(result)]


TORCH_JOB = Job("device.describe", "", ("torch", "gpus", "formats", "division"))
"""Inspection of torch and its devices, which all later tests depend on."""


def plan(formats: Sequence[str]) -> list[Job]:
    """Return all tests with engines, in order.

    Args:
        formats: Format names; tests that need only one format use the first.
    """
    first = formats[0]
    per_format = [
        Job("training.train_format", name, (f"engine-{name}", f"train-{name}", f"probe-{name}")) for name in formats
    ]
    return [
        *per_format,
        Job("training.train_padded", first, ("padded",)),
        Job("training.train_with_graphs", first, ("graphs",), needs_gpu=True),
        Job("training.train_asleep", first, ("sleep",), needs_gpu=True),
        Job("training.train_with_fp8_cache", first, ("kv-cache",), needs_gpu=True),
        Job("server.train_with_server", first, ("server",), patience=2),
    ]
