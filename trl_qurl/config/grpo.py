"""Configuration of GRPO on quantized rollouts: TRL's, plus rollouts, objective and dynamic sampling.

Everything that cannot work together is refused here, before a model is loaded.
"""

import warnings
from dataclasses import dataclass
from typing import Any

from trl import GRPOConfig

from trl_qurl.config.checks import check_choice, check_numbers
from trl_qurl.config.help import with_help
from trl_qurl.config.rollout import QuantizedRolloutsConfig
from trl_qurl.objective import OBJECTIVES, get_objective

CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
"""TRL's losses that clamp the ratio on both sides and average over tokens: what the paper's objectives are made of."""


@with_help
@dataclass
class DynamicSamplingSettings:
    """A mixin for a config of TRL: the settings of dynamic sampling.

    Groups whose rewards are all equal have no advantage and teach nothing. With dynamic sampling they are replaced by
    groups of other prompts until the batch is full, as in DAPO (arXiv:2503.14476, Eq. 11).

    > Dynamic sampling

    Args:
        dynamic_sampling: Whether groups whose rewards are all equal are replaced by groups of other prompts.
        dynamic_sampling_max_rounds: Rounds of generation for one batch, the first one included. If they do not fill
            it, it is used as it is.
        dynamic_sampling_reward: Name of the reward function that decides; by default the weighted sum of all. Name one
            where another would always make a difference, as a penalty for length does.
    """

    dynamic_sampling: bool = False
    dynamic_sampling_max_rounds: int = 10
    dynamic_sampling_reward: str | None = None

    def __post_init__(self: Any) -> None:
        super().__post_init__()  # type: ignore[misc]  # TRL's config, which comes after this class
        check_numbers(self, ["dynamic_sampling_max_rounds"], lambda n: n >= 1, "1 or more (10 is usual)")
        if self.dynamic_sampling_reward is not None and not self.dynamic_sampling:
            raise ValueError("dynamic_sampling_reward judges nothing without dynamic_sampling=True.")


@with_help
@dataclass
class QuRLGRPOConfig(QuantizedRolloutsConfig, DynamicSamplingSettings, GRPOConfig):
    """[`~trl.GRPOConfig`] plus the settings of quantized rollouts ([`QuantizedRolloutsConfig`]), of the objective, and
    of dynamic sampling ([`DynamicSamplingSettings`]). Only new fields, and those whose default changes, are listed.

    > Objective

    Args:
        objective: `acr` (QuRL, Eq. 9), `tis` (FlashRL, Eq. 5), `decoupled` (Eq. 4), `quantized_ratio` (Eq. 3) or
            `naive` (Eq. 1). The cap C is `vllm_importance_sampling_clip_max`.

    > Changed defaults

        vllm_importance_sampling_mode: How TRL forms the importance ratio; the objectives here are per token.
        vllm_importance_sampling_clip_max: Cap C of the importance ratio (a ratio, not a log).

    Raises:
        ValueError: Settings that cannot work together; the message names them and says what to change.
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
                "vllm_importance_sampling_correction=False would hide the engine's log-probabilities: leave it True, "
                "and set objective='naive' for training without correction."
            )
        if self.vllm_importance_sampling_mode != "token_truncate":
            raise ValueError(
                f"vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r} does not fit objective="
                f"{self.objective!r}. Use 'token_truncate', or trl.GRPOTrainer for the other modes."
            )
        if self.importance_sampling_level != "token":
            raise ValueError(
                f"importance_sampling_level={self.importance_sampling_level!r} does not fit objective="
                f"{self.objective!r}, whose clip range is per token: use 'token'."
            )
        if self.loss_type not in CLIPPED_LOSS_TYPES:
            raise ValueError(
                f"loss_type={self.loss_type!r} does not fit objective={self.objective!r}, which is clipped on both "
                f"sides: use one of {', '.join(map(repr, CLIPPED_LOSS_TYPES))}."
            )
        cap = self.vllm_importance_sampling_clip_max
        if objective.correction == "truncated" and (cap is None or not 0 < cap < float("inf")):
            raise ValueError(
                f"objective={self.objective!r} truncates the ratio, but vllm_importance_sampling_clip_max is {cap}: "
                "give a positive cap C (the paper: 2.0), or use objective='decoupled' for none."
            )
        if objective.lifts_upper_bound and self.delta is not None:
            raise ValueError(
                f"delta={self.delta} puts a second upper bound on the ratio, and objective={self.objective!r} lifts "
                "the first: set delta=None, or use objective='tis'."
            )
