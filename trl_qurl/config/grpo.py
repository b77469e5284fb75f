"""Configuration of GRPO on quantized rollouts: TRL's, plus rollouts, objective and dynamic sampling."""

import warnings
from dataclasses import dataclass, fields
from typing import Any

from trl import GRPOConfig

from trl_qurl.config.checks import check_cap, check_choice
from trl_qurl.config.help import with_help
from trl_qurl.config.rollout import QuantizedRolloutsConfig
from trl_qurl.objective import OBJECTIVES, TRL_LOSS, Objective, get_objective

CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
"""TRL's losses that clamp the ratio on both sides and average over tokens, so ACR can lift their upper bound."""

TRL_DEFAULTS = {field.name: field.default for field in fields(GRPOConfig)}


class DefaultCap(float):
    """Marks the cap C that the user has not set, which `objective="trl"` replaces with TRL's; `None` means no cap."""


DEFAULT_CAP = DefaultCap(2.0)


@with_help
@dataclass
class QuRLGRPOConfig(QuantizedRolloutsConfig, GRPOConfig):
    """[`~trl.GRPOConfig`] plus the settings of quantized rollouts ([`QuantizedRolloutsConfig`]), the objective, and
    dynamic sampling. Only new fields and fields with a new default are listed. Settings that conflict raise
    `ValueError`.

    > Objective

    Args:
        objective: `acr` (QuRL, Eq. 9), `tis` (FlashRL, Eq. 5), `decoupled` (Eq. 4), `quantized_ratio` (Eq. 3) or
            `naive` (Eq. 1). The cap C is `vllm_importance_sampling_clip_max`. `icepop` drops tokens, and
            `geometric_mask` completions, with a ratio above C or below `vllm_importance_sampling_clip_min` (by default
            1/C). `trl` is TRL's own loss and correction, with TRL's settings. Defaults to `acr`, or to `tis` with a
            loss that `acr` does not support (GSPO, CISPO, ...).

    > Dynamic sampling

        dynamic_sampling: Whether to replace groups in which all rewards are equal, which teach nothing, with groups of
            other prompts until the batch is full, as in DAPO (arXiv:2503.14476, Eq. 11). If ten rounds of generation
            do not fill it, it is used as is.
        dynamic_sampling_reward: Name of the reward function that decides; by default the weighted sum of all. Set it
            if another reward, such as a length penalty, would always make a difference.

    > Changed defaults

        vllm_importance_sampling_mode: How TRL computes the importance ratio. Defaults to `token_truncate`, because our
            objectives are per token; with `objective="trl"`, to TRL's own default.
        vllm_importance_sampling_clip_max: Cap C of the importance ratio (a ratio, not a log). Defaults to 2.0; with
            `objective="trl"`, to TRL's own default. As in TRL, `None` is no cap.
    """

    vllm_importance_sampling_mode: str | None = None
    vllm_importance_sampling_clip_max: float | None = DEFAULT_CAP
    objective: str | None = None
    dynamic_sampling: bool = False
    dynamic_sampling_reward: str | None = None

    def __post_init__(self) -> None:
        conflict, is_explicit = self._lifted_bounds_conflict(), self.objective is not None
        if self.objective is None:
            self.objective = "tis" if conflict else "acr"
        check_choice(self, "objective", (*OBJECTIVES, TRL_LOSS))
        super().__post_init__()
        if self.dynamic_sampling_reward is not None and not self.dynamic_sampling:
            raise ValueError("dynamic_sampling_reward has no effect unless dynamic_sampling=True.")
        if self.dynamic_sampling and self.rollouts_ahead:
            raise ValueError(
                "dynamic_sampling=True generates again until a batch is full, so it cannot begin the next one ahead: "
                "set rollouts_ahead=0 or dynamic_sampling=False."
            )
        if self.objective == TRL_LOSS:
            return
        objective = get_objective(self.objective)
        self._check_objective(objective)
        if objective.lifts_upper_bound and conflict:
            setting, fix = conflict
            raise ValueError(
                f"{setting} does not fit objective={self.objective!r}, which lifts the upper of two clip bounds per "
                f"token: {fix}, or use objective='tis', which works with any loss, or 'trl'."
            )
        if conflict and not is_explicit:
            warnings.warn(
                f"{conflict[0]} does not fit the default objective 'acr', so 'tis' is used. Set objective='tis' to "
                "avoid this warning.",
                stacklevel=3,
            )
        if is_explicit and objective.lifts_upper_bound and self.updates_per_rollout <= 1:
            warnings.warn(
                "With one optimizer update per rollout the policy ratio is 1 and clipping never applies, so "
                f"objective={self.objective!r} is the same as 'tis'. To make several updates per rollout, as the "
                "paper does, set steps_per_generation above gradient_accumulation_steps, or num_iterations above 1.",
                stacklevel=3,
            )

    def _replace_trl_defaults(self) -> list[str]:
        replaced = super()._replace_trl_defaults()
        mode, cap = "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"
        defaults: dict[str, Any] = {mode: "token_truncate", cap: float(DEFAULT_CAP)}
        if self.objective == TRL_LOSS:
            defaults = TRL_DEFAULTS
        elif self.vllm_importance_sampling_mode == TRL_DEFAULTS[mode]:  # TRL's settings, written out
            for name in (name for name in defaults if getattr(self, name) == TRL_DEFAULTS[name]):
                replaced.append(f"{name}={getattr(self, name)!r} -> {defaults[name]!r}")
                setattr(self, name, defaults[name])
        if self.vllm_importance_sampling_mode is None:
            self.vllm_importance_sampling_mode = defaults[mode]
        if isinstance(self.vllm_importance_sampling_clip_max, DefaultCap):
            self.vllm_importance_sampling_clip_max = defaults[cap]
        return replaced

    def _check_objective(self, objective: Objective) -> None:
        if not self.vllm_importance_sampling_correction:
            raise ValueError(
                "vllm_importance_sampling_correction=False would hide the engine's log-probabilities: leave it True, "
                "and set objective='naive' to train without a correction, or 'trl' for TRL's own loss."
            )
        if self.vllm_importance_sampling_mode != "token_truncate":
            raise ValueError(
                f"vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r} does not fit objective="
                f"{self.objective!r}: leave it out, or use objective='trl', TRL's own loss and correction."
            )
        check_cap(self, objective)

    def _lifted_bounds_conflict(self) -> tuple[str, str] | None:
        """Return the setting that rules out one upper clip bound per token, and what to set instead."""
        if self.importance_sampling_level != "token":
            return f"importance_sampling_level={self.importance_sampling_level!r}", "use 'token'"
        if self.loss_type not in CLIPPED_LOSS_TYPES:
            return f"loss_type={self.loss_type!r}", f"use one of {', '.join(map(repr, CLIPPED_LOSS_TYPES))}"
        if self.delta is not None:
            return f"delta={self.delta}", "set delta=None"
        return None
