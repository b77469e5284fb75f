"""One row per rollout, with TRL's log and the policy's exact accuracy, in `run.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from trl_qurl.lab.demo.evaluate import measure_policy
from trl_qurl.lab.progress import step_line
from trl_qurl.trainers.run_log import RUN_LOG, append_row

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, TrainerControl, TrainerState, TrainingArguments

Row = dict[str, Any]

PRINTED = ("expected_accuracy", "reward", "mismatch/kl_k3")


class RolloutRecorder(TrainerCallback):
    """Callback that adds the policy's exact accuracies to every row, and prints some rows."""

    def __init__(self, problem_ids: Tensor, rollouts: int) -> None:
        self.problem_ids = problem_ids  # (B, P + A)
        self._rollouts = rollouts
        self._done = 0

    def measure(self, model: PreTrainedModel) -> Row:
        """Return the metrics of the current policy. Studies override this to measure more."""
        accuracy = measure_policy(model, self.problem_ids)
        return {"expected_accuracy": accuracy.expected, "greedy_accuracy": accuracy.greedy}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: Row,
        model: PreTrainedModel,
        **kwargs: object,
    ) -> None:
        """Measure the policy and add it to the run's log; TRL logs once per rollout."""
        if "reward" not in logs:  # the summary at the end of training
            return
        metrics = self.measure(model)
        # The trainer has already written its own row for this step.
        append_row(Path(args.output_dir or ".") / RUN_LOG, {"step": state.global_step, **metrics})
        self._done += 1
        if self._done % 10 == 0:
            row = {**metrics, **logs}
            printed = {name: row[name] for name in PRINTED}
            print("rollout", step_line(printed, self._done, self._rollouts), flush=True)
