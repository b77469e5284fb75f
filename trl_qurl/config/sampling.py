"""A warning about sampling settings of which the trainer's log-probabilities know nothing."""

import warnings
from typing import Any

from trl_qurl.objective import OBJECTIVES, TRL_LOSS

NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""The sampling settings that change the engine's log-probabilities, with the values at which they do not."""

NONE_OF_IT = {"top_k": (0, -1)}  # vLLM's two ways to say that all tokens are kept


def warn_of_biased_ratio(args: Any, stacklevel: int) -> None:
    """Warn where sampling makes the importance ratio wrong, and say for what that matters.

    The engine returns log-probabilities as it sampled: of a distribution that was cut and scaled up, or penalized. The
    trainer's are of the whole vocabulary (with `temperature`, which it knows). Where tokens are cut, ρ is too small by
    the factor S, the probability of what was kept: log ρ is off by log S at each position. See
    https://github.com/huggingface/trl/issues/6789 and https://github.com/vllm-project/vllm/issues/42259.

    Args:
        args: A config of TRL, checked by TRL, with or without an `objective`.
        stacklevel: That of the caller, as `warnings.warn` takes it.
    """
    given = biasing_settings(args)
    if not given:
        return
    named = ", ".join(f"{name}={value}" for name, value in given.items())
    wanted = ", ".join(f"{name}={value}" for name, value in {**NEUTRAL, "min_p": None}.items())
    warnings.warn(
        f"{named}: the engine's log-probabilities are those of the distribution that is left, the trainer's are of "
        "the whole vocabulary. So the importance ratio is wrong (too small, where tokens are cut): "
        f"{_harm(args)}. Set {wanted}, also in generation_kwargs. The setting temperature does no harm.",
        stacklevel=stacklevel + 1,
    )


def biasing_settings(args: Any) -> dict[str, Any]:
    """The settings that make the importance ratio wrong, with their values; `generation_kwargs` override fields."""
    overrides = args.generation_kwargs or {}
    given = {}
    for name, neutral in NEUTRAL.items():
        label = f"generation_kwargs[{name!r}]" if name in overrides else name
        value = overrides.get(name, getattr(args, name))
        if value is not None and value not in NONE_OF_IT.get(name, (neutral,)):
            given[label] = value
    if overrides.get("temperature", args.temperature) != args.temperature:  # the trainer reads the field alone
        given["generation_kwargs['temperature']"] = overrides["temperature"]
    return given


def _harm(args: Any) -> str:
    name = vars(args).get("objective")
    if name == TRL_LOSS:
        uses_ratio = vars(args).get("vllm_importance_sampling_correction", False)
    elif name in OBJECTIVES:
        uses_ratio = OBJECTIVES[name].correction != "none" or OBJECTIVES[name].denominator == "behavior"
    else:
        return "the metrics mismatch/* are off, and so is every correction by it"
    if uses_ratio:
        return f"objective={name!r} weighs or clips tokens wrongly, and the metrics mismatch/* are off"
    return f"objective={name!r} does not use it, so only the metrics mismatch/* are off"
