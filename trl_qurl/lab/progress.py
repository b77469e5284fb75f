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

from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState

from trl_qurl.config.rollout import QuantizedRolloutsConfig
from trl_qurl.lab.live import CLEAR, step_line
from trl_qurl.quantization.plan import format_name


class StepLineCallback(TrainerCallback):
    """Callback that prints one line per logged row, in the first process only."""

    # Other callbacks may log as training begins, before this one's turn.
    _started = 0.0
    _first_step = 0
    _widths: Mapping[str, int] = {}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Print the plan of the run and start the clock."""
        self._started, self._first_step, self._widths = time.monotonic(), state.global_step, {}
        if state.is_world_process_zero and isinstance(args, QuantizedRolloutsConfig):
            print(_plan(args, state.max_steps), flush=True)

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        """Print the line."""
        if state.is_world_process_zero and logs:
            done = state.global_step - self._first_step
            # The first step includes the whole rollout, so wait until its updates are done.
            updates = args.updates_per_rollout if isinstance(args, QuantizedRolloutsConfig) else 1
            step_s = (time.monotonic() - self._started) / done if done >= max(1, updates) else None
            line = step_line(logs, state.global_step, state.max_steps, step_s, self._widths)
            print(CLEAR * sys.stdout.isatty() + line, flush=True)


def use_step_lines(trainer: Trainer) -> None:
    """Make a trainer print one short line per logged row, instead of a progress bar and the whole
    row.

    The table in notebooks stays, and so do all metrics in `run.jsonl` and in the targets of
    `report_to`.

    Args:
        trainer: Any Hugging Face trainer, before `train()`.
    """
    for callback in list(trainer.callback_handler.callbacks):
        # leave the user's subclasses alone
        if type(callback) in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(callback)
            trainer.add_callback(StepLineCallback())


def _plan(args: Any, steps: int) -> str:
    """Summarize a run in one line, from its `QuantizedRolloutsConfig` and its number of optimizer
    steps.
    """
    name, answers, updates = (
        args.rollout_quantization,
        args.generation_batch_size,
        args.updates_per_rollout,
    )
    number, questions = math.ceil(steps / updates), answers // args.num_generations
    rollouts = (
        f"{number} {'16-bit' if name is None else format_name(name).upper()} "
        f"rollout{'s' * (number > 1)}"
    )
    warmup = args.get_warmup_steps(steps) if args.lr_scheduler_type != "constant" else 0
    rise = f"; the learning rate rises for {warmup} steps" if warmup else ""
    return (
        f"{steps} steps: {rollouts} of {answers} answers ({questions} questions x "
        f"{args.num_generations}), up to {args.max_completion_length} tokens, {updates:g} updates "
        f"each ({args.objective}){rise}"
    )
