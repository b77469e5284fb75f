"""A step of training as one line of a terminal, instead of a dictionary of sixty metrics.

transformers draws the bar. The whole row is still in `run.jsonl`, and wherever `report_to` sends it.
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

WIDTH = 100  # columns of a line, unless the terminal has fewer

# What a line shows, the most important first: a line that is too long loses its end.
METRICS = (
    ("expected_accuracy", "accuracy {:.3f}"),  # of the demo
    ("reward", "reward {:.3f}"),
    ("s/step", "{:.3g} s/step"),  # this and the next are measured here
    ("left", "left {}"),
    ("mismatch/kl_k3", "KL {:.1e}"),
    ("critic/explained_variance", "critic {:.2f}"),
    ("clip_ratio/region_mean", "clip {:.1%}"),
    ("completions/mean_length", "length {:.0f}"),
    ("throughput/generated_tokens_per_s", "{:.0f} tok/s"),
)

AVERAGE = "_avg@1"  # end of the names under which a benchmark's share of right answers is logged
ALARMS = ("loss", "grad_norm")  # shown where they are not finite, which says that something is broken


class StepLineCallback(ProgressCallback):
    """[`~transformers.ProgressCallback`] that writes a line for what was logged, at most `WIDTH` columns wide.

    Without a terminal (a pipe, a file, a batch system) or with `disable_tqdm` there is no bar and the lines remain.
    Only the first process writes. `use_step_lines` replaces the trainer's own by it.
    """

    _started = 0.0
    _first_step = 0
    _updates_per_rollout = 1.0

    def __init__(self) -> None:
        super().__init__()
        self._columns = {"s/step": len("24.1 s/step"), "left": len("left 11:34:05")}  # known after the first rollout

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Say what the run will do, and start the clock, and the bar where there is a terminal."""
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
        """Move the bar of an evaluation."""
        if _has_bars(args):
            super().on_prediction_step(args, *more, **kwargs)

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write the line, above the bar if there is one."""
        if not state.is_world_process_zero or not logs:
            return
        done = state.global_step - self._first_step
        # The first step has a whole rollout, which the others share.
        step_s = (time.monotonic() - self._started) / done if done and done >= self._updates_per_rollout else None
        width = min(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH
        line = step_line(logs, state.global_step, state.max_steps, step_s, width, self._columns)
        if self.training_bar is None or self.training_bar.disable:
            print(line, flush=True)
        else:
            self.training_bar.write(line)


def use_step_lines(trainer: Trainer) -> None:
    """Let a trainer write one short line for each row it logs, instead of the row itself.

    A notebook keeps its table. Rows in `run.jsonl` and in what `report_to` names stay whole.

    Args:
        trainer: Any of Hugging Face, before `train()`.
    """
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback) in (ProgressCallback, PrinterCallback):  # and not a subclass of somebody else's
            trainer.remove_callback(callback)
            trainer.add_callback(StepLineCallback())


def _plan(args: Any, steps: int) -> str:
    """What a run will do, in one line, from its `QuantizedRolloutsConfig` and its number of optimizer steps."""
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
    """A logged row in one line; a metric that is missing is left out, and so is what does not fit.

    Args:
        logs: The row, as the trainer logs it.
        step: Optimizer steps done.
        steps: Optimizer steps of the whole run.
        step_s: Seconds per step, where that is known.
        width: Columns that the line may take.
        columns: Widths of the metrics in the lines of steps before this one, which this one keeps; updated here.

    Returns:
        The line, without an end.
    """
    numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
    fields = [f"{name} {numbers[name]}" for name in ALARMS if not math.isfinite(numbers.get(name, 0.0))]
    answered = [name.removesuffix(AVERAGE) for name in numbers if name.startswith("eval_") and name.endswith(AVERAGE)]
    if "train_runtime" in numbers:
        fields.append(f"trained in {duration(numbers['train_runtime'])}")
    elif answered:
        fields += [field for name in answered for field in _benchmark(numbers, name)]
    elif evaluated := {name[5:]: value for name, value in numbers.items() if name.startswith("eval_")}:
        shown = [*_metrics(evaluated).values()] or [f"loss {evaluated['loss']:.4g}"] * ("loss" in evaluated)
        fields += ["eval", *shown, *([duration(evaluated["runtime"])] if "runtime" in evaluated else [])]
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


def _aligned(shown: Mapping[str, str], columns: dict[str, int]) -> list[str]:
    """Each metric in the column that it had before; one that is missing leaves its column blank."""
    for name, text in shown.items():
        columns[name] = max(columns.get(name, 0), len(text))
    return [shown.get(name, "").ljust(columns[name]) for name, _ in METRICS if name in columns]


def _benchmark(numbers: Mapping[str, float], name: str) -> list[str]:
    """What a benchmark found: `eval_<task>/<who>_avg@1` and its companions."""
    task, who = name.split("/")
    forms = {
        name + AVERAGE: lambda share: f"{share:.1%} right",
        f"{name}_tokens": lambda length: f"length {length:.0f}",
        f"{name}_finished": lambda share: f"{share:.0%} finished",
        f"{task}/seconds": duration,
    }
    shown = [form(numbers[metric]) for metric, form in forms.items() if metric in numbers]
    return [f"{task.removeprefix('eval_')} ({who})", *shown]


def duration(seconds: float) -> str:
    """Seconds as people read them.

    Args:
        seconds: Any number of them.

    Returns:
        Such as `12 s`, `3:25`, `1:02:03` or `2d 03h`.
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
