"""One row per rollout, with TRL's log and the policy's exact accuracy: shown live and saved in
`run.jsonl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from trl_qurl.lab.demo.evaluate import measure_policy
from trl_qurl.lab.live import step_line
from trl_qurl.trainers.run_log import RUN_LOG, append_row

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, TrainerState

Row = dict[str, Any]


class RolloutRecorder(TrainerCallback):
    """Callback that adds the full-precision policy's expected and greedy accuracy to every row, and
    prints some.
    """

    def __init__(self, problem_ids: Tensor, rollouts: int) -> None:
        self.problem_ids = problem_ids  # (B, P + A)
        self._rollouts, self._done = rollouts, 0

    def measure(self, model: PreTrainedModel) -> Row:
        """Return the metrics of the current policy. Studies override this to measure more."""
        accuracy = measure_policy(model, self.problem_ids)
        return {"expected_accuracy": accuracy.expected, "greedy_accuracy": accuracy.greedy}

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        *more: Any,
        logs: Row,
        model: PreTrainedModel,
        **kwargs: Any,
    ) -> None:
        """Measure the policy and add it to the run's log; TRL logs once per rollout."""
        if "reward" not in logs:  # the summary at the end of training
            return
        metrics = self.measure(model) | {"held_out_answers": len(self.problem_ids)}
        # The trainer has already written its own row for this step.
        append_row(Path(args.output_dir or ".") / RUN_LOG, {"step": state.global_step, **metrics})
        self._done += 1
        if self._done % 10 == 0:
            print("rollout", step_line({**metrics, **logs}, self._done, self._rollouts), flush=True)
