"""One row per rollout, with TRL's log and the policy's exact accuracy: shown live and saved in `run.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import TrainerCallback

from trl_qurl.lab.demo.evaluate import measure_policy
from trl_qurl.lab.progress import step_line
from trl_qurl.trainers.run_log import RUN_LOG, append_row

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor
    from transformers import PreTrainedModel, TrainerState

Row = dict[str, Any]


def progress_bar(console: Console, *extra: str) -> Progress:
    """Build a progress bar with count and elapsed time; `extra` adds columns in rich markup."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    columns += [TextColumn(text) for text in extra]
    return Progress(*columns, TimeElapsedColumn(), TextColumn("elapsed"), console=console)


class RolloutRecorder(TrainerCallback):
    """Callback that adds the full-precision policy's expected and greedy accuracy to every logged row.

    The progress bar is visible inside `with recorder.progress:`.
    """

    def __init__(self, problem_ids: Tensor, rollouts: int, console: Console) -> None:
        self.rows: list[Row] = []
        self.problem_ids = problem_ids  # (B, P + A)
        self._rollouts = rollouts
        self.progress = progress_bar(console)
        self._bar = self.progress.add_task("Reinforcement learning, rollout", total=rollouts)

    def measure(self, model: PreTrainedModel) -> Row:
        """Return the metrics of the current policy. Studies override this to measure more."""
        accuracy = measure_policy(model, self.problem_ids)
        return {"expected_accuracy": accuracy.expected, "greedy_accuracy": accuracy.greedy}

    def on_log(
        self, args: Any, state: TrainerState, *more: Any, logs: Row, model: PreTrainedModel, **kwargs: Any
    ) -> None:
        """Measure the policy and store the row; TRL logs once per rollout."""
        if "reward" not in logs:  # the summary at the end of training
            return
        metrics = self.measure(model)
        self.rows.append({**metrics, **logs})
        # The trainer has already written its own row for this step.
        append_row(Path(args.output_dir or ".") / RUN_LOG, {"step": state.global_step, **metrics})
        self.progress.advance(self._bar)
        if len(self.rows) % 10 == 0:
            line = step_line(self.rows[-1], len(self.rows), self._rollouts)
            self.progress.console.print(line, no_wrap=True, overflow="ellipsis")
