"""Seconds of the optimizer steps themselves, apart from the rollouts that happen inside them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback


class StepTimer(TrainerCallback):
    """Measures each optimizer step (forward, backward, clipping, update) without the time spent in `paused()`."""

    def __init__(self) -> None:
        self._started = 0.0
        self._excluded = 0.0
        self._pauses = 0
        self._finished: list[float] = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the block out of the running step; blocks may be nested."""
        self._pauses += 1
        started = time.perf_counter()
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                self._excluded += time.perf_counter() - started

    def pop(self) -> list[float]:
        """Seconds of the steps that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._started = time.perf_counter()
        self._excluded = 0.0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Keep the seconds of the step, which include the optimizer's update."""
        self._finished.append(time.perf_counter() - self._started - self._excluded)
