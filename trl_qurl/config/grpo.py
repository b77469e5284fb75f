"""Configuration of GRPO on quantized rollouts: TRL's, plus rollouts, objective and dynamic sampling."""

import warnings
from dataclasses import dataclass, fields
from typing import Any

from trl import GRPOConfig

from trl_qurl.config.checks import check_cap, check_choice
from trl_qurl.config.help import with_help
from trl_qurl.config.rollout import QuantizedRolloutsConfig
from trl_qurl.objective import OBJECTIVES, TRL_LOSS, get_objective

CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
"""TRL's losses that clamp the ratio on both sides and average over tokens, from which ACR can be made."""

MODE, CAP = "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"
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
            `naive` (Eq. 1). The cap C is `vllm_importance_sampling_clip_max`. `trl` is TRL's own loss and correction,
            with TRL's settings. Defaults to `acr`, to `tis` with a loss that `acr` does not support (GSPO, CISPO,
            ...), and to `trl` with another correction of TRL's, or none.

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
            `objective="trl"`, to TRL's own default.
    """

    vllm_importance_sampling_mode: str | None = None
    vllm_importance_sampling_clip_max: float | None = DEFAULT_CAP
    objective: str | None = None
    dynamic_sampling: bool = False
    dynamic_sampling_reward: str | None = None

    def __post_init__(self) -> None:
        default = next(name for name in ("acr", "tis", TRL_LOSS) if self._conflict(name) is None)
        is_explicit = self.objective is not None
        self.objective = default if self.objective is None else self.objective
        check_choice(self, "objective", (*OBJECTIVES, TRL_LOSS))
        super().__post_init__()
        if self.dynamic_sampling_reward is not None and not self.dynamic_sampling:
            raise ValueError("dynamic_sampling_reward has no effect unless dynamic_sampling=True.")
        if self.dynamic_sampling and self.rollouts_ahead:
            raise ValueError(
                "dynamic_sampling=True generates again until a batch is full, so it cannot begin the next one ahead: "
                "set rollouts_ahead=0 or dynamic_sampling=False."
            )
        if not is_explicit and (conflict := self._conflict("acr")):
            warnings.warn(
                f"{conflict[0]} does not fit the default objective 'acr', so {default!r} is used. Set objective="
                f"{default!r} to avoid this warning.",
                stacklevel=3,
            )
        if self.objective == TRL_LOSS:
            return
        if conflict := self._conflict(self.objective):
            raise ValueError(
                f"{conflict[0]} does not fit objective={self.objective!r}: {conflict[1]}, or use objective={default!r}"
                + ("." if default == TRL_LOSS else ", which works with any loss, or 'trl', TRL's own.")
            )
        check_cap(self, get_objective(self.objective))

    def _replace_trl_defaults(self) -> list[str]:
        replaced = super()._replace_trl_defaults()
        defaults: dict[str, Any] = {MODE: "token_truncate", CAP: float(DEFAULT_CAP)}
        if self.objective == TRL_LOSS:
            defaults = TRL_DEFAULTS
        elif self.vllm_importance_sampling_mode == TRL_DEFAULTS[MODE]:  # TRL's settings, written out
            for name in (name for name in defaults if getattr(self, name) == TRL_DEFAULTS[name]):
                replaced.append(f"{name}={getattr(self, name)!r} -> {defaults[name]!r}")
                setattr(self, name, defaults[name])
        if self.vllm_importance_sampling_mode is None:
            self.vllm_importance_sampling_mode = defaults[MODE]
        if isinstance(self.vllm_importance_sampling_clip_max, DefaultCap):
            self.vllm_importance_sampling_clip_max = defaults[CAP]
        return replaced

    def _conflict(self, objective: str) -> tuple[str, str] | None:
        """Return a setting that rules out an objective, and what to set instead."""
        if objective == TRL_LOSS:
            return None
        if not self.vllm_importance_sampling_correction:
            return "vllm_importance_sampling_correction=False", "leave it True ('naive' has no correction)"
        if self.vllm_importance_sampling_mode not in (None, "token_truncate", TRL_DEFAULTS[MODE]):
            return f"vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r}", "leave it out"
        if self.vllm_importance_sampling_clip_min is not None:
            return f"vllm_importance_sampling_clip_min={self.vllm_importance_sampling_clip_min}", "leave it out"
        if not get_objective(objective).lifts_upper_bound:
            return None
        if self.importance_sampling_level != "token":
            return f"importance_sampling_level={self.importance_sampling_level!r}", "use 'token'"
        if self.loss_type not in CLIPPED_LOSS_TYPES:
            return f"loss_type={self.loss_type!r}", f"use one of {', '.join(map(repr, CLIPPED_LOSS_TYPES))}"
        if self.use_bias_correction_kl and self.beta != 0.0:  # weights the penalty by the ratio, which ACR changes
            return f"use_bias_correction_kl=True with beta={self.beta}", "set use_bias_correction_kl=False"
        if self.delta is not None:
            return f"delta={self.delta}", "set delta=None"
        return None
