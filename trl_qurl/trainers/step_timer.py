"""The time of an optimizer step."""

import time
from typing import Any

from trl_qurl.trainers.callbacks import TrainerAwareCallback


class StepTimer(TrainerAwareCallback):
    """Callback that times each optimizer step (forward, backward, clipping, update) without rollouts inside it."""

    _started = 0.0

    def exclude(self, seconds: float) -> None:
        """Exclude these seconds from the current step."""
        self._started += seconds

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Record the duration of the step in seconds, including the optimizer's update."""
        self.trainer._record({"time/update_s": time.perf_counter() - self._started})
