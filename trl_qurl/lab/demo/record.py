"""One row per rollout: TRL's log and the policy's exact accuracy, shown while it grows and kept in `run.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import TrainerCallback

from trl_qurl.lab.demo.evaluate import measure_policy
from trl_qurl.trainers.run_log import RUN_LOG, RunLog

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor
    from transformers import PreTrainedModel, TrainerControl, TrainerState, TrainingArguments

Row = dict[str, Any]

# Metrics named in the lines shown while training: column, label, format.
SHOWN = (
    ("expected_accuracy", "accuracy", "{:.3f}"),
    ("reward", "reward", "{:.3f}"),
    ("mismatch/kl_k3", "KL", "{:.1e}"),
    ("clip_ratio/region_mean", "clipped", "{:.1%}"),
    ("critic/explained_variance", "critic", "{:.0%}"),
)
SHOW_EVERY = 10  # rollouts


def progress_bar(console: Console, *further: str) -> Progress:
    """A bar with the count and the elapsed time; `further` are texts in rich's markup."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    columns += [TextColumn(text) for text in further]
    return Progress(*columns, TimeElapsedColumn(), TextColumn("elapsed"), console=console)


class RolloutRecorder(TrainerCallback):
    """Adds the expected and the greedy accuracy of the full-precision policy to every row that the trainer logs."""

    def __init__(self, problem_ids: Tensor, rollouts: int, console: Console) -> None:
        self.rows: list[Row] = []
        self._problem_ids = problem_ids  # (B, P + A)
        self._progress = progress_bar(console)
        self._bar = self._progress.add_task("Reinforcement learning, rollout", total=rollouts)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Show the bar."""
        self._progress.start()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: Row,
        model: PreTrainedModel,
        **kwargs: Any,
    ) -> None:
        """Measure the policy and keep the row; TRL logs once per rollout."""
        if "reward" not in logs:  # the summary that closes a training run
            return
        accuracy = measure_policy(model, self._problem_ids)
        measured = {"expected_accuracy": accuracy.expected, "greedy_accuracy": accuracy.greedy}
        self.rows.append({"rollout": len(self.rows) + 1, "step": state.global_step, **measured, **logs})
        # Beside the row that the trainer has written there by itself.
        RunLog(Path(args.output_dir or ".") / RUN_LOG).append({"step": state.global_step, **measured})
        self._progress.advance(self._bar)
        if len(self.rows) % SHOW_EVERY == 0:
            self._progress.console.print(describe(self.rows[-1]))

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave the bar as it stands."""
        self._progress.stop()


def describe(row: Row) -> str:
    """One line on a rollout; a metric that was not logged is left out."""
    shown = [f"{label} {form.format(row[name])}" for name, label, form in SHOWN if row.get(name) is not None]
    return "  ".join([f"rollout {row['rollout']:>3}", *shown])  # fits into 80 columns
