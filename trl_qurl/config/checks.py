"""Checks shared by the configurations."""

import warnings
from collections.abc import Callable, Collection
from difflib import get_close_matches
from math import inf
from typing import Any

from trl_qurl.objective import OBJECTIVES, TRL_LOSS, Objective

NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling settings that change the engine's log-probabilities, with the values that turn them off."""

DISABLED = {"top_k": (0, -1)}  # vLLM has two ways to keep all tokens


def check_choice(name: str, value: str | None, choices: Collection[str]) -> None:
    """Raise `ValueError` for a value not in `choices`; the message lists them and suggests the closest match."""
    if value not in choices:
        near = get_close_matches(str(value), choices, 1)
        guess = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(map(repr, choices))}{guess}")


def check_numbers(config: object, names: Collection[str], is_allowed: Callable[[Any], bool], requirement: str) -> None:
    """Raise `ValueError` for settings with a number that is not allowed; `requirement` says what each must be."""
    for name in names:
        value = getattr(config, name)
        if not is_allowed(value):
            raise ValueError(f"{name} is {value}, but must be {requirement}.")


def check_cap(objective: Objective, cap: float | None, floor: float | None) -> None:
    """Raise `ValueError` for a cap C or a floor that cannot limit the importance ratio."""
    if objective.correction in ("none", "full"):
        return
    if cap is None or not 0 < cap < inf:
        raise ValueError(
            f"objective={objective.name!r} limits the ratio, but vllm_importance_sampling_clip_max is {cap}: "
            "give a positive cap C (the paper uses 2.0), or use objective='decoupled' for no cap."
        )
    if floor is not None and not 0 <= floor <= cap:
        raise ValueError(
            f"vllm_importance_sampling_clip_min is {floor}, but must lie between 0 and "
            f"vllm_importance_sampling_clip_max={cap}; None means no floor."
        )


def warn_of_biased_ratio(args: Any, stacklevel: int) -> None:
    """Warn if sampling settings make the importance ratio wrong, and state what is affected.

    The engine reports log-probabilities of the distribution it sampled from: truncated and renormalized, or penalized.
    The trainer's cover the whole vocabulary, at the same `temperature`. If tokens are cut, ρ is too small by the
    factor S, the probability mass that remains: log ρ is off by log S at each position. See
    https://github.com/huggingface/trl/issues/6789 and https://github.com/vllm-project/vllm/issues/42259.

    Args:
        args: A config that TRL has validated, with or without an `objective`.
        stacklevel: The caller's, as for `warnings.warn`.
    """
    biasing = biasing_settings(args)
    if not biasing:
        return
    settings = ", ".join(f"{name}={value}" for name, value in biasing.items())
    neutral = ", ".join(f"{name}={value}" for name, value in {**NEUTRAL, "min_p": None}.items())
    warnings.warn(
        f"{settings}: the engine's log-probabilities account for this, but the trainer's cover the unmodified "
        "distribution over the whole vocabulary. The importance ratio is therefore wrong (too small if tokens are "
        f"cut): {_harm(args)}. Set {neutral}, also in generation_kwargs. The temperature setting does no harm.",
        stacklevel=stacklevel + 1,
    )


def biasing_settings(args: Any) -> dict[str, Any]:
    """Return the settings that make the importance ratio wrong, by name; `generation_kwargs` override fields."""
    overrides = args.generation_kwargs or {}
    biasing = {}
    for name, neutral in NEUTRAL.items():
        label = f"generation_kwargs[{name!r}]" if name in overrides else name
        value = overrides.get(name, getattr(args, name))
        if value is not None and value not in DISABLED.get(name, (neutral,)):
            biasing[label] = value
    if overrides.get("temperature", args.temperature) != args.temperature:  # the trainer reads only the field
        biasing["generation_kwargs['temperature']"] = overrides["temperature"]
    return biasing


def _harm(args: Any) -> str:
    name = vars(args).get("objective")
    if name == TRL_LOSS:
        uses_ratio = vars(args).get("vllm_importance_sampling_correction", False)
    elif name in OBJECTIVES:
        uses_ratio = OBJECTIVES[name].correction != "none" or OBJECTIVES[name].denominator == "behavior"
    else:
        return "the mismatch/* metrics are wrong, and so is every correction based on it"
    if uses_ratio:
        return f"objective={name!r} weighs or clips tokens wrongly, and the mismatch/* metrics are wrong"
    return f"objective={name!r} does not use it, so only the mismatch/* metrics are wrong"
