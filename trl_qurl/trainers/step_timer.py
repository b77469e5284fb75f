"""Seconds of the optimizer steps themselves, apart from the rollouts that happen inside them."""

import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback


class StepTimer(TrainerCallback):
    """
    Measure each optimizer step (forward, backward, clipping, update) without the time spent on rollouts.

    Args:
        record: Called with the seconds of every finished step.
    """

    def __init__(self, record: Callable[[float], None]) -> None:
        self._record = record
        self._started = 0.0
        self._excluded = 0.0

    def exclude(self, seconds: float) -> None:
        """Leave these seconds out of the running step."""
        self._excluded += seconds

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._started = time.perf_counter()
        self._excluded = 0.0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Record the step, which includes the optimizer's update."""
        self._record(time.perf_counter() - self._started - self._excluded)
