"""Print each training step as one line, instead of a dictionary of sixty metrics.

There is no progress bar: each line has the time left. All metrics are still in `run.jsonl` and in
the targets of `report_to`.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from trl_qurl.config.rollout import QuantizedRolloutsConfig

__all__ = ["StepLineCallback", "use_step_lines"]

METRICS = {
    "expected_accuracy": "accuracy {:.3f}",  # logged by the demo
    "reward": "reward {:.3f}",
    "mismatch/kl_k3": "KL {:.0e}",
    "critic/explained_variance": "critic {:z.2f}",
    "clip_ratio/region_mean": "clip {:.1%}",
    "completions/clipped_ratio": "cut {:.0%}",
}
"""Metrics of a line, with their formats. A terminal of 80 columns has no room for more."""

ALARMS = ("loss", "grad_norm")  # shown only if they are not finite, which indicates a fault

LONG_STEP_S = 60.0


class StepLineCallback(TrainerCallback):
    """Callback that prints one line per logged row, in the first process only."""

    def __init__(self) -> None:
        # Other callbacks may log as training begins, before this one's turn.
        self._started = 0.0
        self._first_step = 0

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Start the clock."""
        self._started = time.monotonic()
        self._first_step = state.global_step

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        """Print the line."""
        if not state.is_world_process_zero or not logs:
            return
        done = state.global_step - self._first_step
        # The first step includes the whole rollout, so wait until its updates are done.
        updates = args.updates_per_rollout if isinstance(args, QuantizedRolloutsConfig) else 1
        step_s = None
        if done >= max(1, updates):
            step_s = (time.monotonic() - self._started) / done
        print(step_line(logs, state.global_step, state.max_steps, step_s), flush=True)


def use_step_lines(trainer: Trainer) -> None:
    """Make a trainer print one short line per logged row.

    It replaces the progress bar and the printed rows. The table in notebooks stays, and so do all
    metrics in `run.jsonl` and in the targets of `report_to`.

    Args:
        trainer: Any Hugging Face trainer, before `train()`.
    """
    for callback in list(trainer.callback_handler.callbacks):
        # Leave the user's subclasses alone.
        if type(callback) in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(callback)
            trainer.add_callback(StepLineCallback())


@contextmanager
def live_line(trainer: Trainer) -> Iterator[None]:
    """While the block runs, say once a minute which step has not ended since the last time.

    Args:
        trainer: A trainer with rollouts in vLLM.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(weakref.proxy(trainer), ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _watch(trainer: Any, ended: threading.Event) -> None:
    step = -1
    while not ended.wait(LONG_STEP_S) and trainer.is_world_process_zero():
        state = trainer.state
        if state.global_step == step:
            line = f"{datetime.now():%Y-%m-%d %H:%M:%S}  step {step + 1}/{state.max_steps}"
            llm = getattr(trainer.vllm_generation, "llm", None)  # a server has none
            unfinished = llm.llm_engine.get_num_unfinished_requests() if llm else 0
            if unfinished:
                line += f": {unfinished} answers are not complete yet"
            print(line, flush=True)
        step = state.global_step


def step_line(logs: Mapping[str, Any], step: int, steps: int, step_s: float | None = None) -> str:
    """Format a logged row as one line, with `METRICS` and the pace.

    A row without any of `METRICS` is shown with all its numbers.

    Args:
        logs: The row.
        step: Number of steps that are done.
        steps: Number of steps of the run.
        step_s: Seconds of each, if known.
    """
    if "train_runtime" in logs:
        return f"{step}/{steps}  trained for {_clock(logs['train_runtime'])}"
    fields = [f"{step:>{len(str(steps))}}/{steps}" if steps else "before training"]
    numbers = {
        name: value
        for name, value in logs.items()
        if isinstance(value, int | float) and name != "epoch"
    }
    for name in ALARMS:
        if not math.isfinite(numbers.get(name, 0.0)):
            fields.append(f"{name} {numbers[name]}")
    if any(name.startswith("eval_") for name in numbers):
        fields.append("eval")
    numbers = {name.removeprefix("eval_"): value for name, value in numbers.items()}
    known = [form.format(numbers[name]) for name, form in METRICS.items() if name in numbers]
    fields += known or [f"{name} {value:.5g}" for name, value in numbers.items()]
    if "loss" in logs and step_s is not None:  # a step, and no evaluation
        left = step_s * (steps - step)
        fields += [f"{step_s:.3g} s/step", f"left {_clock(left)}"]
    return "  ".join(fields)


def _clock(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))
