"""Settings that cannot work together, as tables, and the check that reads them."""

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any, NamedTuple

from trl import GRPOConfig

from trl_qurl.objective import TRL_LOSS, get_objective


class Conflict(NamedTuple):
    """Settings of a configuration that cannot work as they are."""

    settings: tuple[str, ...]  # named in the message, with their values
    occurs: Callable[[Any], bool]  # whether a configuration has the conflict
    reason: str
    way_out: str

    def given(self, config: Any) -> str:
        """Return the settings with their values."""
        return " and ".join(f"{name}={getattr(config, name)!r}" for name in self.settings)


CONFLICTS = (
    Conflict(
        ("use_vllm",),
        lambda config: not config.use_vllm,
        "only vLLM generates with quantized weights",
        "Set it to True, or use TRL's own trainer",
    ),
    Conflict(
        ("weight_sync",),
        lambda config: config.weight_sync == "llmcompressor" and find_spec("llmcompressor") is None,
        "llm-compressor is not installed",
        "Run `pip install 'trl-qurl[llmcompressor]'`, or use 'auto', which sends the same codes",
    ),
    Conflict(
        ("vllm_engine_kwargs", "vllm_mode"),
        lambda config: config.vllm_engine_kwargs and config.vllm_mode == "server",
        "a server is started with its own arguments",
        "Pass them to `trl-qurl serve`",
    ),
    Conflict(
        ("smooth_activations", "rollout_quantization", "weight_sync", "round_base"),
        lambda config: config.smooth_activations and not config.smooths,
        "smoothing is folded into whole INT8 weights as they are sent",
        "Leave smooth_activations out",
    ),
)
"""With any trainer."""

# Settings of TRL's loss that an objective does not fit
# --------------------------------------------------------------------------------------------------

CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
"""TRL's losses that clamp the ratio on both sides and average over tokens, from which ACR can be
made."""

UNCORRECTED = Conflict(
    ("vllm_importance_sampling_correction", "objective"),
    lambda config: not config.vllm_importance_sampling_correction,
    "it turns off the correction that the objective is",
    "Leave it True ('naive' has no correction), or use objective='trl'",
)
"""With all objectives but TRL's."""

LIFTED_BOUND = (
    Conflict(
        ("importance_sampling_level", "objective"),
        lambda config: config.importance_sampling_level != "token",
        "the clip bounds of single tokens are lifted",
        "Use 'token', or objective='tis'",
    ),
    Conflict(
        ("loss_type", "objective"),
        lambda config: config.loss_type not in CLIPPED_LOSS_TYPES,
        "the loss must clip the ratio of a token on both sides",
        f"Use one of {', '.join(map(repr, CLIPPED_LOSS_TYPES))}, or objective='tis'",
    ),
    Conflict(
        ("beta", "objective"),
        lambda config: config.use_bias_correction_kl and config.beta != 0.0,
        "TRL's use_bias_correction_kl, on by default, weights the penalty by the ratio, which the "
        "objective changes",
        "Set use_bias_correction_kl=False, or objective='tis'",
    ),
    Conflict(
        ("delta", "objective"),
        lambda config: config.delta is not None,
        "it bounds the ratio, which the objective changes",
        "Set delta=None, or objective='tis'",
    ),
)
"""With objectives that lift the upper clip bound."""


def _only_trls(setting: str) -> Conflict:
    """Return the conflict of a setting of TRL's correction that is not the default."""
    name = f"vllm_importance_sampling_{setting}"
    default = getattr(GRPOConfig, name)
    return Conflict(
        (name, "objective"),
        lambda config: getattr(config, name) != default,
        "only TRL's own correction reads it",
        "Leave it out",
    )


TRLS_CORRECTION = (_only_trls("mode"), _only_trls("clip_min"), _only_trls("clip_max"))
"""With the default objective: one that was chosen does not read these settings."""

WITH_A_CRITIC = {
    "loss_type": CLIPPED_LOSS_TYPES,  # those with one ratio per token, clipped on both sides
    "importance_sampling_level": ("token",),
    "dynamic_sampling": (False,),  # compares completions of a group, as do the next two
    "scale_rewards": ("none", False),
    "multi_objective_aggregation": ("sum_then_normalize",),
}
"""Values of settings that fit advantages of a critic."""


def check_conflicts(config: Any, conflicts: Iterable[Conflict]) -> None:
    """Raise `ValueError` for the first conflict that a configuration has."""
    for conflict in conflicts:
        if conflict.occurs(config):
            raise ValueError(
                f"{conflict.given(config)} cannot work: {conflict.reason}. {conflict.way_out}."
            )


def check_objective(config: Any) -> None:
    """Raise `ValueError` if settings of TRL's loss do not fit the objective."""
    if config.objective == TRL_LOSS:
        return
    check_conflicts(config, [UNCORRECTED])
    if get_objective(config.objective).lifts_upper_bound:
        check_conflicts(config, LIFTED_BOUND)


def default_objective(config: Any) -> tuple[str, Conflict | None]:
    """Return the objective that fits the settings of TRL's loss, and what rules out `acr`."""
    for conflict in (UNCORRECTED, *TRLS_CORRECTION):
        if conflict.occurs(config):
            return TRL_LOSS, conflict
    for conflict in LIFTED_BOUND:
        if conflict.occurs(config):
            return "tis", conflict
    return "acr", None
