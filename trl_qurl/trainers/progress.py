"""A step of training as one line of a terminal, in the place of a dictionary of sixty metrics.

The whole row stays where it is kept: in `run.jsonl`, and wherever `report_to` sends it.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

WIDTH = 100
"""Columns of a line, unless the terminal has fewer."""

LEAST_WIDTH = 60
"""Columns that a line takes in any terminal."""

Row = Mapping[str, Any]

METRICS: tuple[tuple[str, str], ...] = (
    ("reward", "reward {:.3f}"),
    ("completions/mean_length", "length {:.0f}"),
    ("mismatch/kl_k3", "KL {:.1e}"),
    ("clip_ratio/region_mean", "clip {:.1%}"),
    ("critic/explained_variance", "critic {:.2f}"),
    ("throughput/generated_tokens_per_s", "{:.0f} tok/s"),
)
"""What a line shows, from left to right."""

DISPENSABLE = ("tok/s", "length", "clip", "critic", "s/step", "KL")
"""What a line that is too long loses, first to last."""

AVERAGE = "_avg@1"
"""End of the names under which a benchmark's share of right answers is logged."""

ALARMS = ("loss", "grad_norm")
"""Shown where they are not finite, which says that something is broken."""


class Pace(NamedTuple):
    """
    How fast a run goes.

    Attributes:
        step_s: Seconds of a step, since the row before.
        left_s: Seconds to the end, at the pace of the whole run.
    """

    step_s: float
    left_s: float


class StepLineCallback(ProgressCallback):
    """
    [`~transformers.ProgressCallback`] that writes a line for what was logged, at most `WIDTH` columns wide.

    Without a terminal (a pipe, a file, a batch system) or with `disable_tqdm` there is no bar and the lines remain.
    Only the first process writes. `use_step_lines` puts it in the place of the trainer's own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._started = 0.0
        self._first_step = 0
        self._logged_at = 0.0
        self._logged_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock, and the bar where there is a terminal."""
        self._started = self._logged_at = time.monotonic()
        self._first_step = self._logged_step = state.global_step
        if _has_bars(args):
            super().on_train_begin(args, state, control, **kwargs)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move the bar."""
        if self.training_bar is not None:
            super().on_step_end(args, state, control, **kwargs)

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        """Move the bar of an evaluation."""
        if _has_bars(args):
            super().on_prediction_step(args, state, control, eval_dataloader, **kwargs)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the line, above the bar if there is one."""
        if not state.is_world_process_zero or not logs:
            return
        width = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
        pace = self._pace(state) if "loss" in logs else None
        line = step_line(logs, state.global_step, state.max_steps, pace, max(LEAST_WIDTH, min(WIDTH, width)))
        if self.training_bar is not None:
            self.training_bar.write(line)
        else:
            print(line, flush=True)

    def _pace(self, state: TrainerState) -> Pace | None:
        """How fast it goes, at a row of steps; `None` if no step was made since the last one."""
        now, step = time.monotonic(), state.global_step
        if step <= self._logged_step:
            return None
        recent = (now - self._logged_at) / (step - self._logged_step)
        overall = (now - self._started) / (step - self._first_step)
        self._logged_at, self._logged_step = now, step
        return Pace(recent, overall * (state.max_steps - step))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the bar as it stands."""
        if self.training_bar is not None:
            super().on_train_end(args, state, control, **kwargs)


def use_step_lines(trainer: Trainer) -> None:
    """
    Let a trainer write one short line for each row it logs, in the place of the row itself.

    A notebook keeps its table. Rows in `run.jsonl` and in what `report_to` names stay whole.

    Args:
        trainer: Any of Hugging Face, before `train()`.
    """
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback) in (ProgressCallback, PrinterCallback):  # and not what somebody made of them
            trainer.remove_callback(callback)
            trainer.add_callback(StepLineCallback())


def step_line(logs: Row, step: int, steps: int, pace: Pace | None = None, width: int = WIDTH) -> str:
    """
    A logged row in one line; a metric that is missing is left out.

    Args:
        logs: The row, as the trainer logs it.
        step: Optimizer steps done.
        steps: Optimizer steps of the whole run.
        pace: How fast it goes, where that is known.
        width: Columns that the line may take.

    Returns:
        The line, without an end.
    """
    place = f"{step:>{len(str(steps))}}/{steps}"
    fields = [form.format(logs[name]) for name, form in METRICS if _is_number(logs.get(name))]
    if "train_runtime" in logs:
        fields = [f"trained in {_duration(logs['train_runtime'])}"]
    elif answered := [name for name in logs if name.startswith("eval_") and name.endswith(AVERAGE)]:
        fields = [field for name in answered for field in _task_fields(logs, *name.removesuffix(AVERAGE).split("/"))]
    elif any(name.startswith("eval_") for name in logs):
        fields = ["eval", *_evaluation_fields(logs)]
    elif not fields or "loss" not in logs:
        fields = [f"{name} {value:.4g}" for name, value in logs.items() if _is_number(value) and name != "epoch"]
    elif pace is not None:
        fields.append(f"{pace.step_s:.3g} s/step")
        if step < steps:
            fields.append(f"left {_duration(pace.left_s)}")
    alarms = [
        f"{name} {logs[name]}" for name in ALARMS if _is_number(logs.get(name)) and not math.isfinite(logs[name])
    ]
    return _fitted([place, *alarms, *fields], width)


def _fitted(fields: Sequence[str], width: int) -> str:
    """The fields with two spaces between them, less of them where they would not fit."""
    shown = list(fields)
    for word in DISPENSABLE:
        if len("  ".join(shown)) <= width:
            break
        shown = [field for field in shown if word not in field]
    line = "  ".join(shown)
    return line if len(line) <= width else line[: width - 1] + "…"


def _task_fields(logs: Row, task: str, who: str) -> list[str]:
    """What a benchmark found: `eval_<task>/<who>_avg@1` and its companions."""
    fields: tuple[tuple[str, Callable[[float], str]], ...] = (
        (who + AVERAGE, lambda share: f"{share:.1%} right"),
        (f"{who}_tokens", lambda length: f"length {length:.0f}"),
        (f"{who}_finished", lambda share: f"{share:.0%} finished"),
        ("seconds", _duration),
    )
    shown = [form(logs[f"{task}/{name}"]) for name, form in fields if _is_number(logs.get(f"{task}/{name}"))]
    return [f"{task.removeprefix('eval_')} ({who})", *shown]


def _evaluation_fields(logs: Row) -> list[str]:
    """What `Trainer.evaluate` found."""
    fields = [form.format(logs[f"eval_{name}"]) for name, form in METRICS if _is_number(logs.get(f"eval_{name}"))]
    if not fields and _is_number(logs.get("eval_loss")):
        fields = [f"loss {logs['eval_loss']:.4g}"]
    return [*fields, _duration(logs["eval_runtime"])] if _is_number(logs.get("eval_runtime")) else fields


def _duration(seconds: float) -> str:
    """`12 s`, `3:25`, `1:02:03` or `2d 03h`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _has_bars(args: TrainingArguments) -> bool:
    return sys.stderr.isatty() and not args.disable_tqdm
