"""Configuration of GRPO on quantized rollouts, with objectives and dynamic sampling."""

import warnings
from dataclasses import dataclass
from typing import Any

from trl import GRPOConfig

from trl_qurl.config.checks.conflicts import check_objective, default_objective
from trl_qurl.config.checks.values import check_choice
from trl_qurl.config.help import with_help
from trl_qurl.config.rollout import QuantizedRolloutsConfig
from trl_qurl.objective import OBJECTIVES, TRL_LOSS


@with_help
@dataclass
class QuRLGRPOConfig(QuantizedRolloutsConfig, GRPOConfig):
    """[`~trl.GRPOConfig`] plus objective, dynamic sampling and [`QuantizedRolloutsConfig`].

    Only new fields are listed. Settings that conflict raise `ValueError`.

    > Objective

    Args:
        objective: `acr` (QuRL, Eq. 9; the default), `tis` (FlashRL, Eq. 5), `decoupled` (Eq. 4),
            `quantized_ratio` (Eq. 3), `naive` (Eq. 1) or `trl`, TRL's own loss and correction,
            which TRL's `vllm_importance_sampling_*` set. The default is `tis` with a loss that
            `acr` does not support (GSPO, CISPO, ...), and `trl` if these change TRL's correction
            or turn it off.

    > Dynamic sampling

        dynamic_sampling: Whether to replace groups in which all rewards are equal, which teach
            nothing, with groups of other prompts until the batch is full, as in DAPO
            (arXiv:2503.14476, Eq. 11). If ten rounds of generation do not fill it, it is used as
            is.
        dynamic_sampling_reward: Name of the reward function that decides; by default the weighted
            sum of all. Set it if another reward, such as a length penalty, would always make a
            difference. It turns dynamic sampling on.
    """

    objective: str | None = None
    dynamic_sampling: bool = False
    dynamic_sampling_reward: str | None = None

    def __post_init__(self: Any) -> None:
        if self.objective is None:
            self.objective = "acr"
            default, conflict = default_objective(self)
            if conflict is not None:
                warnings.warn(
                    f"{conflict.given(self)}, the default, do not fit: {conflict.reason}. So "
                    f"objective={default!r} is used; set it to avoid this warning.",
                    stacklevel=3,
                )
            self.objective = default
        check_choice(self, "objective", (*OBJECTIVES, TRL_LOSS))
        if self.dynamic_sampling_reward is not None:
            self.dynamic_sampling = True
        super().__post_init__()
        check_objective(self)
