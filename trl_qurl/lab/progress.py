"""Print each training step as one line, instead of a dictionary of sixty metrics.

There is no progress bar: each line has the time left. All metrics are still in `run.jsonl` and in
the targets of `report_to`.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
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

from trl_qurl.config import QuantizedRolloutsConfig, QuRLGRPOConfig, QuRLRLOOConfig
from trl_qurl.lab.live import CLEAR, step_line
from trl_qurl.quantization.plan import format_name


class StepLineCallback(TrainerCallback):
    """Callback that prints one line per logged row, in the first process only."""

    def __init__(self) -> None:
        # Other callbacks may log as training begins, before this one's turn.
        self._started = 0.0
        self._first_step = 0
        self._widths: dict[str, int] = {}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Print the plan of the run and start the clock."""
        self._started = time.monotonic()
        self._first_step = state.global_step
        self._widths = {}
        # Configs of other trainers have no objective.
        is_ours = isinstance(args, QuRLGRPOConfig | QuRLRLOOConfig)
        if state.is_world_process_zero and is_ours:
            print(_plan(args, state.max_steps), flush=True)

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
        line = step_line(logs, state.global_step, state.max_steps, step_s, self._widths)
        if sys.stdout.isatty():
            line = CLEAR + line
        print(line, flush=True)


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


def _plan(args: QuRLGRPOConfig | QuRLRLOOConfig, steps: int) -> str:
    """Summarize a run in one line, from its config and its number of optimizer steps."""
    formats = args.rollout_quantization
    name = "16-bit" if formats is None else format_name(formats).upper()
    answers = args.generation_batch_size
    questions = answers // args.num_generations
    updates = args.updates_per_rollout
    number = math.ceil(steps / updates)
    rollouts = f"{number} {name} {'rollout' if number == 1 else 'rollouts'}"
    size = f"{answers} answers ({questions} questions x {args.num_generations})"
    plan = (
        f"{steps} steps: {rollouts} of {size}, up to {args.max_completion_length} tokens, "
        f"{updates:g} updates each ({args.objective})"
    )
    if args.lr_scheduler_type != "constant":
        warmup = args.get_warmup_steps(steps)
        if warmup:
            plan += f"; the learning rate rises for {warmup} steps"
    return plan
