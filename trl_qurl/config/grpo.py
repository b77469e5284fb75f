"""Configuration of GRPO on quantized rollouts: TRL's, plus rollouts, objective and dynamic sampling.

Everything that cannot work together is refused here, before a model is loaded.
"""

import warnings
from dataclasses import dataclass

from trl import GRPOConfig

from trl_qurl.config.checks import check_choice
from trl_qurl.config.dynamic_sampling import DynamicSamplingSettings
from trl_qurl.config.help import with_help
from trl_qurl.config.rollout import QuantizedRolloutsConfig
from trl_qurl.objective import OBJECTIVES, get_objective

CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
"""TRL's losses that clamp the ratio on both sides and average over tokens: what the paper's objectives are made of."""


@with_help
@dataclass
class QuRLGRPOConfig(QuantizedRolloutsConfig, DynamicSamplingSettings, GRPOConfig):
    """
    [`~trl.GRPOConfig`] plus the settings of quantized rollouts ([`QuantizedRolloutsConfig`]), of the objective, and of
    dynamic sampling ([`DynamicSamplingSettings`]). Only new fields, and those whose default changes, are listed.

    > Objective

    Args:
        objective: `acr` (QuRL, Eq. 9), `tis` (FlashRL, Eq. 5), `decoupled` (Eq. 4), `quantized_ratio` (Eq. 3) or
            `naive` (Eq. 1). The cap C is `vllm_importance_sampling_clip_max`.

    > Changed defaults

        vllm_importance_sampling_mode: How TRL forms the importance ratio; the objectives here are per token.
        vllm_importance_sampling_clip_max: Cap C of the importance ratio (a ratio, not a log).

    Raises:
        ValueError: Settings that cannot work together; the message names them and says what to change.
        ImportError: `weight_sync="llmcompressor"` without llm-compressor.
    """

    vllm_importance_sampling_mode: str = "token_truncate"
    vllm_importance_sampling_clip_max: float | None = 2.0
    objective: str = "acr"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_objective()
        if get_objective(self.objective).lifts_upper_bound and self.updates_per_rollout <= 1:
            warnings.warn(
                "With one optimizer update per rollout the policy ratio is 1 and no clip bound can bind, so "
                f"objective={self.objective!r} is the same as 'tis'. To make several updates per rollout, as the "
                "paper does, set steps_per_generation above gradient_accumulation_steps, or num_iterations above 1.",
                stacklevel=3,
            )

    def _check_objective(self) -> None:
        check_choice("objective", self.objective, OBJECTIVES)
        objective = get_objective(self.objective)
        if not self.vllm_importance_sampling_correction:
            raise ValueError(
                "vllm_importance_sampling_correction=False would hide the log-probabilities that the objective and "
                "the mismatch metrics need: leave it True, and set objective='naive' for training without correction."
            )
        if self.vllm_importance_sampling_mode != "token_truncate":
            raise ValueError(
                f"vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r} does not fit "
                f"objective={self.objective!r}: the paper's ratio is per token and truncated. Use 'token_truncate', "
                "or trl.GRPOTrainer for the other modes."
            )
        if self.importance_sampling_level != "token":
            raise ValueError(
                f"importance_sampling_level={self.importance_sampling_level!r} does not fit objective="
                f"{self.objective!r}, whose clip range is per token: use 'token'."
            )
        if self.loss_type not in CLIPPED_LOSS_TYPES:
            raise ValueError(
                f"loss_type={self.loss_type!r} does not fit objective={self.objective!r}, which is a surrogate "
                f"clipped on both sides: use one of {', '.join(map(repr, CLIPPED_LOSS_TYPES))}."
            )
        cap = self.vllm_importance_sampling_clip_max
        if objective.correction == "truncated" and (cap is None or not 0 < cap < float("inf")):
            raise ValueError(
                f"objective={self.objective!r} truncates the importance ratio, but vllm_importance_sampling_clip_max "
                f"is {cap}: give a positive cap C (the paper's setting is 2.0), or use objective='decoupled' for none."
            )
        if objective.lifts_upper_bound and self.delta is not None:
            raise ValueError(
                f"delta={self.delta} puts a second upper bound on the ratio, which undoes what objective="
                f"{self.objective!r} lifts: set delta=None, or use objective='tis'."
            )
