"""Configuration of GRPO on quantized rollouts, with objectives and dynamic sampling."""

import warnings
from dataclasses import dataclass
from typing import Any

from trl import GRPOConfig

from trl_qurl.config.checks import check_choice, check_conflicts
from trl_qurl.config.help import with_help
from trl_qurl.config.refusals import (
    GRPO_CONFLICTS,
    LARGEST_WEIGHT,
    LIFTED_BOUND,
    TRLS_CORRECTION,
    UNCORRECTED,
    Conflict,
)
from trl_qurl.config.rollout import QuantizedRolloutsConfig
from trl_qurl.objective import OBJECTIVES, TRL_LOSS, get_objective


@with_help
@dataclass
class QuRLGRPOConfig(QuantizedRolloutsConfig, GRPOConfig):
    """[`~trl.GRPOConfig`] plus objective, dynamic sampling and [`QuantizedRolloutsConfig`].

    Only new fields are listed. Settings that conflict raise `ValueError`.

    > Objective

    Args:
        objective: `acr` (QuRL, Eq. 9), `tis` (FlashRL, Eq. 5), `decoupled` (Eq. 4),
            `quantized_ratio` (Eq. 3), `naive` (Eq. 1) or `trl`, TRL's own loss and correction,
            which TRL's `vllm_importance_sampling_*` set. Defaults to `acr`, to `tis` with a loss
            that `acr` does not support (GSPO, CISPO, ...), and to `trl` with another correction of
            TRL's, or none.

    > Dynamic sampling

        dynamic_sampling: Whether to replace groups in which all rewards are equal, which teach
            nothing, with groups of other prompts until the batch is full, as in DAPO
            (arXiv:2503.14476, Eq. 11). If ten rounds of generation do not fill it, it is used as
            is.
        dynamic_sampling_reward: Name of the reward function that decides; by default the weighted
            sum of all. Set it if another reward, such as a length penalty, would always make a
            difference.
    """

    objective: str | None = None
    dynamic_sampling: bool = False
    dynamic_sampling_reward: str | None = None

    def __post_init__(self: Any) -> None:
        default = next(name for name in ("acr", "tis", TRL_LOSS) if self._conflict(name) is None)
        if self.objective is None:
            conflict = self._conflict("acr")
            if conflict is not None:
                warnings.warn(
                    f"{conflict.given(self)} does not fit the default objective 'acr', so "
                    f"{default!r} is used. Set objective={default!r} to avoid this warning.",
                    stacklevel=3,
                )
            self.objective = default
        check_choice(self, "objective", (*OBJECTIVES, TRL_LOSS))
        mode = GRPOConfig.vllm_importance_sampling_mode
        if (
            self.objective != TRL_LOSS
            and self.loss_type == "vespo"
            and self.vllm_importance_sampling_mode == mode
        ):
            # TRL's trainer refuses its default with VESPO. This is what our objectives do.
            self.vllm_importance_sampling_mode = "token_truncate"
        super().__post_init__()
        check_conflicts(self, GRPO_CONFLICTS)
        conflict = self._conflict(self.objective)
        if conflict is not None:
            instead = f"objective={default!r}"
            if default != TRL_LOSS:
                instead += ", which works with any loss, or 'trl', TRL's own"
            raise ValueError(
                f"{conflict.given(self)} does not fit objective={self.objective!r}: "
                f"{conflict.reason}. {conflict.way_out}, or use {instead}."
            )
        if self.objective != TRL_LOSS:
            self._warn_of_unread()

    def _warn_of_unread(self) -> None:
        """Warn of settings that only TRL's own correction reads."""
        unread = [each for each in (LARGEST_WEIGHT, *TRLS_CORRECTION) if each.occurs(self)]
        if unread:
            sentences = [
                f"{each.given(self)} has no effect with objective={self.objective!r}: "
                f"{each.reason}. {each.way_out}."
                for each in unread
            ]
            warnings.warn(" ".join(sentences), stacklevel=4)

    def _conflict(self, objective: str) -> Conflict | None:
        """Return what rules out an objective."""
        if objective == TRL_LOSS:
            return None
        conflicts = [UNCORRECTED]
        if self.objective is None:
            conflicts += TRLS_CORRECTION
        if get_objective(objective).lifts_upper_bound:
            conflicts += LIFTED_BOUND
        return next((conflict for conflict in conflicts if conflict.occurs(self)), None)
