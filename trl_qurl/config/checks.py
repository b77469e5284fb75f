"""Checks shared by the configurations."""

import re
import warnings
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from math import inf
from typing import Any

from trl_qurl.objective import Objective

NEUTRAL = {"top_p": (1.0, None), "top_k": (0, -1, None), "min_p": (0.0, None), "repetition_penalty": (1.0, None)}
"""Sampling settings that change the engine's log-probabilities, with the values that turn them off."""


def check_choice(config: object, name: str, choices: Collection[str]) -> None:
    """Raise `ValueError` if a setting is not in `choices`; the message lists them and suggests the closest match."""
    value = getattr(config, name)
    if value not in choices:
        near = get_close_matches(str(value), choices, 1)
        guess = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(map(repr, choices))}{guess}")


def check_number(config: object, name: str, is_allowed: Callable[[Any], bool], requirement: str) -> None:
    """Raise `ValueError` if a setting is not a number or not allowed; `requirement` says what it must be."""
    value = getattr(config, name)
    if not isinstance(value, int | float) or not is_allowed(value):
        raise ValueError(f"{name} is {value!r}, but must be {requirement}.")


def check_patterns(patterns: Iterable[str], name: str) -> None:
    """Raise `ValueError` for a pattern that starts with `re:` but is not a regular expression."""
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"{name} is {patterns!r}, but must be a list of patterns, or [] for none.")
    for pattern in patterns:
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise ValueError(f"{name} has {pattern!r}, which is not a regular expression: {error}.") from None


def check_cap(config: Any, objective: Objective) -> None:
    """Raise `ValueError` for a cap C or a floor that cannot limit the importance ratio."""
    if objective.correction in ("none", "full"):
        return
    cap, floor = config.vllm_importance_sampling_clip_max, config.vllm_importance_sampling_clip_min
    if cap is None or not 0 < cap < inf:
        raise ValueError(
            f"objective={objective.name!r} limits the ratio, but vllm_importance_sampling_clip_max is {cap}: "
            "give a positive cap C (default 2.0), or use objective='decoupled' for no cap."
        )
    if objective.correction == "masked_sequence" and cap >= 2:
        raise ValueError(
            f"objective={objective.name!r} drops completions whose mean ratio per token exceeds C, and at "
            f"vllm_importance_sampling_clip_max={cap} it drops none: set it close to 1, such as 1.3 for answers of a "
            "few tokens or 1.05 for long ones."
        )
    if floor is not None and not 0 <= floor <= cap:
        raise ValueError(
            f"vllm_importance_sampling_clip_min is {floor}, but must lie between 0 and "
            f"vllm_importance_sampling_clip_max={cap}; None means no floor."
        )


def warn_of_biased_ratio(config: Any, stacklevel: int) -> None:
    """Warn if sampling settings make the importance ratio wrong; `generation_kwargs` override fields.

    The engine reports log-probabilities of the distribution it sampled from, the trainer those over the whole
    vocabulary, at the same `temperature`. If tokens are cut, log ρ is off by log S, where S is the mass that remains:
    https://github.com/huggingface/trl/issues/6789 and https://github.com/vllm-project/vllm/issues/42259.
    """
    overrides = config.generation_kwargs or {}
    biasing = []
    for name, neutral in NEUTRAL.items():
        value = overrides.get(name, getattr(config, name))
        if value not in neutral:
            biasing.append(f"generation_kwargs[{name!r}]={value}" if name in overrides else f"{name}={value}")
    if overrides.get("temperature", config.temperature) != config.temperature:  # the trainer reads only the field
        biasing.append(f"generation_kwargs['temperature']={overrides['temperature']}")
    if biasing:
        warnings.warn(
            f"{', '.join(biasing)}: the engine's log-probabilities account for this, but the trainer's cover the "
            "unmodified distribution over the whole vocabulary. The importance ratio is therefore wrong (too small if "
            "tokens are cut), and so are the mismatch/* metrics and every correction or clip bound based on it. Set "
            "top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0, also in generation_kwargs. The temperature "
            "setting does no harm.",
            stacklevel=stacklevel + 1,
        )
