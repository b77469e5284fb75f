"""Configuration of GRPO on quantized rollouts: TRL's, plus rollouts, objective and dynamic
sampling.
"""

import warnings
from dataclasses import dataclass
from typing import Any

from trl import GRPOConfig

from trl_qurl.config.checks import check_choice
from trl_qurl.config.help import with_help
from trl_qurl.config.rollout import QuantizedRolloutsConfig
from trl_qurl.objective import OBJECTIVES, TRL_LOSS, get_objective

CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
"""TRL's losses that clamp the ratio on both sides and average over tokens, from which ACR can be
made.
"""

VESPO_MODES = ("token_truncate", "token_mask")
"""TRL's modes of its correction that its trainer accepts with VESPO."""

TRL_ONLY = "leave it out, or use objective='trl'"
INSTEAD = {
    "vllm_importance_sampling_clip_max": "set importance_cap",
    "vllm_importance_sampling_clip_min": TRL_ONLY,
    "vllm_importance_sampling_mode": TRL_ONLY,
}
"""TRL's settings that only `objective="trl"` reads, and what to do with the other objectives."""


@with_help
@dataclass
class QuRLGRPOConfig(QuantizedRolloutsConfig, GRPOConfig):
    """[`~trl.GRPOConfig`] plus the settings of quantized rollouts ([`QuantizedRolloutsConfig`]),
    the objective, and dynamic sampling. Only new fields are listed. Settings that conflict raise
    `ValueError`.

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

    def __post_init__(self) -> None:
        default = next(name for name in ("acr", "tis", TRL_LOSS) if self._conflict(name) is None)
        if self.objective is None:
            if conflict := self._conflict("acr"):
                choice = (
                    f"{conflict[0]} does not fit the default objective 'acr', so {default!r} is "
                    "used"
                )
                warnings.warn(
                    f"{choice}. Set objective={default!r} to avoid this warning.", stacklevel=3
                )
            self.objective = default
        check_choice(self, "objective", (*OBJECTIVES, TRL_LOSS))
        self._check_vespo()
        super().__post_init__()
        if self.dynamic_sampling_reward is not None and not self.dynamic_sampling:
            raise ValueError("dynamic_sampling_reward has no effect unless dynamic_sampling=True.")
        if self.dynamic_sampling and self.rollouts_ahead:
            reason = (
                "dynamic_sampling=True generates until a batch is full, so it cannot begin the "
                "next one ahead"
            )
            raise ValueError(f"{reason}: set rollouts_ahead=0 or dynamic_sampling=False.")
        if conflict := self._conflict(self.objective):
            raise ValueError(
                f"{conflict[0]} does not fit objective={self.objective!r}: {conflict[1]}, or use "
                f"objective={default!r}"
                + (
                    "."
                    if default == TRL_LOSS
                    else ", which works with any loss, or 'trl', TRL's own."
                )
            )
        if self.objective != TRL_LOSS and (unread := self._unread()):
            texts = (
                f"{setting} has no effect with objective={self.objective!r}: {way}."
                for setting, way in unread
            )
            warnings.warn(" ".join(texts), stacklevel=3)

    def _check_vespo(self: Any) -> None:
        """Choose a mode of TRL's correction that its trainer accepts with VESPO, or raise
        `ValueError`.
        """
        mode = self.vllm_importance_sampling_mode
        if (
            self.loss_type != "vespo"
            or not self.vllm_importance_sampling_correction
            or mode in VESPO_MODES
        ):
            return
        if self.objective == TRL_LOSS:
            raise ValueError(
                f"loss_type='vespo' does not fit vllm_importance_sampling_mode={mode!r}: use one "
                f"of {', '.join(map(repr, VESPO_MODES))}, or objective='tis'."
            )
        if mode == GRPOConfig.vllm_importance_sampling_mode:
            self.vllm_importance_sampling_mode = "token_truncate"  # as our objectives do

    def _unread(self) -> list[tuple[str, str]]:
        """Return the settings of TRL's correction that were changed, with their values, and what to
        set instead.
        """
        changed = {
            name: getattr(self, name)
            for name in INSTEAD
            if getattr(self, name) != getattr(GRPOConfig, name)
        }
        # Our objectives cut the ratio of each token, as TRL does in this mode, which VESPO
        # requires.
        return [
            (f"{name}={value!r}", INSTEAD[name])
            for name, value in changed.items()
            if value != "token_truncate"
        ]

    def _conflict(self, objective: str) -> tuple[str, str] | None:
        """Return a setting that rules out an objective, and what to set instead."""
        if objective == TRL_LOSS:
            return None
        if not self.vllm_importance_sampling_correction:
            return (
                "vllm_importance_sampling_correction=False",
                "leave it True ('naive' has no correction)",
            )
        if self.objective is None and (
            wanted := [item for item in self._unread() if item[1] == TRL_ONLY]
        ):
            return wanted[0]
        if not get_objective(objective).lifts_upper_bound:
            return None
        if self.importance_sampling_level != "token":
            return f"importance_sampling_level={self.importance_sampling_level!r}", "use 'token'"
        if self.loss_type not in CLIPPED_LOSS_TYPES:
            return (
                f"loss_type={self.loss_type!r}",
                f"use one of {', '.join(map(repr, CLIPPED_LOSS_TYPES))}",
            )
        # weights the penalty by the ratio, which ACR changes
        if self.use_bias_correction_kl and self.beta != 0.0:
            return (
                f"use_bias_correction_kl=True with beta={self.beta}",
                "set use_bias_correction_kl=False",
            )
        if self.delta is not None:
            return f"delta={self.delta}", "set delta=None"
        return None
