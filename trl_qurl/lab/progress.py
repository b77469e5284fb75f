"""Print each training step as one line, instead of a dictionary of sixty metrics.

The progress bar comes from transformers. All metrics are still in `run.jsonl` and in the targets of `report_to`.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerState, TrainingArguments

from trl_qurl.config.rollout import QuantizedRolloutsConfig
from trl_qurl.quantization.formats import get_scheme

WIDTH = 100  # maximum columns of a line; fewer in a narrower terminal

# Most important first, because a line that is too long is cut at the end.
METRICS = (
    ("expected_accuracy", "accuracy {:.3f}"),  # logged by the demo
    ("reward", "reward {:.3f}"),
    ("s/step", "{:.3g} s/step"),  # this and the next metric are measured here
    ("left", "left {}"),
    ("mismatch/kl_k3", "KL {:.1e}"),
    ("critic/explained_variance", "critic {:.2f}"),
    ("clip_ratio/region_mean", "clip {:.1%}"),
    ("completions/mean_length", "length {:.0f}"),
    ("throughput/generated_tokens_per_s", "{:.0f} tok/s"),
)

AVERAGE = "_avg@1"  # suffix of the metric for a benchmark's share of correct answers
ALARMS = ("loss", "grad_norm")  # shown only if they are not finite, which indicates a fault


class StepLineCallback(ProgressCallback):
    """[`~transformers.ProgressCallback`] that prints one line per logged row, at most `WIDTH` columns wide.

    Without a terminal (a pipe, a file, a batch system) or with `disable_tqdm`, it prints the lines without a bar. Only
    the first process prints. `use_step_lines` substitutes it for the trainer's callback.
    """

    _started = 0.0
    _first_step = 0
    _updates_per_rollout = 1.0

    def __init__(self) -> None:
        super().__init__()
        self._columns = {"s/step": len("24.1 s/step"), "left": len("left 11:34:05")}  # known after the first rollout

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Print the plan of the run, and start the clock and, in a terminal, the bar."""
        self._started, self._first_step = time.monotonic(), state.global_step
        if isinstance(args, QuantizedRolloutsConfig):
            self._updates_per_rollout = args.updates_per_rollout
            if state.is_world_process_zero:
                print(_plan(args, state.max_steps), flush=True)
        if _has_bars(args):
            super().on_train_begin(args, state, control, **kwargs)
        else:
            self.training_bar, self.current_step = tqdm(disable=True), 0

    def on_prediction_step(self, args: TrainingArguments, *more: Any, **kwargs: Any) -> None:
        """Advance the bar of an evaluation."""
        if _has_bars(args):
            super().on_prediction_step(args, *more, **kwargs)

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print the line, above the bar if there is one."""
        if not state.is_world_process_zero or not logs:
            return
        done = state.global_step - self._first_step
        # The first step includes the whole rollout, so wait until its updates are done.
        step_s = (time.monotonic() - self._started) / done if done and done >= self._updates_per_rollout else None
        width = min(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH
        line = step_line(logs, state.global_step, state.max_steps, step_s, width, self._columns)
        if self.training_bar is None or self.training_bar.disable:
            print(line, flush=True)
        else:
            self.training_bar.write(line)


def use_step_lines(trainer: Trainer) -> None:
    """Make a trainer print one short line per logged row, instead of the row itself.

    The table in notebooks stays, and so do all metrics in `run.jsonl` and in the targets of `report_to`.

    Args:
        trainer: Any Hugging Face trainer, before `train()`.
    """
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback) in (ProgressCallback, PrinterCallback):  # leave the user's subclasses alone
            trainer.remove_callback(callback)
            trainer.add_callback(StepLineCallback())


def _plan(args: Any, steps: int) -> str:
    """Summarize a run in one line, from its `QuantizedRolloutsConfig` and its number of optimizer steps."""
    name, answers, updates = args.rollout_quantization, args.num_generations, args.updates_per_rollout
    rollouts = f"{math.ceil(steps / updates)} {'16-bit' if name is None else get_scheme(name).label} rollouts"
    return (
        f"{steps} steps: {rollouts} of {args.generation_batch_size // answers} questions x {answers} answers, "
        f"up to {args.max_completion_length} tokens, {updates:g} updates each ({args.objective})"
    )


def step_line(
    logs: Mapping[str, Any],
    step: int,
    steps: int,
    step_s: float | None = None,
    width: int = WIDTH,
    columns: dict[str, int] | None = None,
) -> str:
    """Format a logged row as one line, leaving out metrics that are missing or do not fit.

    Args:
        logs: The row, as the trainer logs it.
        step: Number of completed optimizer steps.
        steps: Number of optimizer steps of the whole run.
        step_s: Seconds per step, if known.
        width: Maximum number of columns.
        columns: Column widths from earlier lines, for alignment; updated in place.

    Returns:
        The line, without a newline.
    """
    numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
    fields = [f"{name} {numbers[name]}" for name in ALARMS if not math.isfinite(numbers.get(name, 0.0))]
    tasks = [name.removesuffix(AVERAGE) for name in numbers if name.startswith("eval_") and name.endswith(AVERAGE)]
    if "train_runtime" in numbers:
        fields.append(f"trained in {duration(numbers['train_runtime'])}")
    elif tasks:
        fields += [field for name in tasks for field in _benchmark(numbers, name)]
    elif evaluation := {name[5:]: value for name, value in numbers.items() if name.startswith("eval_")}:
        texts = [*_metrics(evaluation).values()] or [f"loss {evaluation['loss']:.4g}"] * ("loss" in evaluation)
        fields += ["eval", *texts, *([duration(evaluation["runtime"])] if "runtime" in evaluation else [])]
    elif "loss" in numbers:
        pace: dict[str, Any] = {} if step_s is None else {"s/step": step_s}
        if step_s is not None and step < steps:
            pace["left"] = duration(step_s * (steps - step))
        fields += _aligned(_metrics(numbers | pace), {} if columns is None else columns)
    else:
        fields += [f"{name} {value:.4g}" for name, value in numbers.items() if name != "epoch"]
    line = f"{step:>{len(str(steps))}}/{steps}"
    for field in fields:
        if len(line) + 2 + len(field) > width:
            break
        line += f"  {field}"
    return line.rstrip()


def _metrics(numbers: Mapping[str, Any]) -> dict[str, str]:
    return {name: form.format(numbers[name]) for name, form in METRICS if name in numbers}


def _aligned(texts: Mapping[str, str], columns: dict[str, int]) -> list[str]:
    """Align metrics with the columns of earlier lines; missing metrics leave their columns blank."""
    for name, text in texts.items():
        columns[name] = max(columns.get(name, 0), len(text))
    return [texts.get(name, "").ljust(columns[name]) for name, _ in METRICS if name in columns]


def _benchmark(numbers: Mapping[str, float], name: str) -> list[str]:
    """Format the results of a benchmark: `eval_<task>/<who>_avg@1` and related metrics."""
    task, who = name.split("/")
    forms = {
        name + AVERAGE: lambda share: f"{share:.1%} correct",
        f"{name}_tokens": lambda length: f"length {length:.0f}",
        f"{name}_finished": lambda share: f"{share:.0%} finished",
        f"{task}/seconds": duration,
    }
    texts = [form(numbers[metric]) for metric, form in forms.items() if metric in numbers]
    return [f"{task.removeprefix('eval_')} ({who})", *texts]


def duration(seconds: float) -> str:
    """Format a duration for display.

    Args:
        seconds: Duration in seconds.

    Returns:
        Text such as `12 s`, `3:25`, `1:02:03` or `2d 03h`.
    """
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _has_bars(args: TrainingArguments) -> bool:
    return sys.stderr.isatty() and not args.disable_tqdm
