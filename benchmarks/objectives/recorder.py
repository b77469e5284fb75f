"""What a run of the study records: the accuracy of the full-precision policy, and of the quantized
one.
"""

import copy
from typing import Any

from transformers import PreTrainedModel

from trl_qurl.lab.demo.evaluate import measure_policy
from trl_qurl.lab.demo.record import RolloutRecorder, Row
from trl_qurl.lab.fake_quantization import quantized_forward
from trl_qurl.quantization.plan import make_plan
from trl_qurl.quantization.scheme import QuantizationScheme


class BothPolicies(RolloutRecorder):
    """[`RolloutRecorder`] that also measures the quantized policy, as the trainer computes it.

    Args:
        scheme: Format of the rollouts.
        merges: Whether an adapter is merged before it is rounded; otherwise it stays beside the
            rounded base.
        **others: As in the parent.
    """

    def __init__(self, scheme: QuantizationScheme, merges: bool, **others: Any) -> None:
        super().__init__(**others)
        self._scheme = scheme
        self._merges = merges

    def measure(self, model: PreTrainedModel) -> Row:
        """The parent's, and the expected accuracy of the quantized policy."""
        return {**super().measure(model), "quantized_expected_accuracy": self._quantized(model)}

    def _quantized(self, model: Any) -> float:
        if self._merges and hasattr(model, "merge_and_unload"):
            # merging and unmerging would leave rounding behind
            model = copy.deepcopy(model).merge_and_unload()
            # TRL's, which still computes with the model that was copied
            vars(model).pop("forward", None)
        with quantized_forward(model, make_plan(model, self._scheme.name)):
            return measure_policy(model, self.problem_ids).expected
