"""Checks that the configurations share."""

from collections.abc import Callable, Collection
from difflib import get_close_matches
from math import inf
from typing import Any

from trl_qurl.objective import Objective


def check_choice(name: str, value: str | None, choices: Collection[str]) -> None:
    """Refuse a value that is not one of `choices`; the message lists them, and names one that is spelled like it."""
    if value not in choices:
        near = get_close_matches(str(value), choices, 1)
        guess = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(map(repr, choices))}{guess}")


def check_numbers(config: object, names: Collection[str], is_allowed: Callable[[Any], bool], wanted: str) -> None:
    """Refuse numbers that are not allowed; the message says what each of these settings must be."""
    for name in names:
        value = getattr(config, name)
        if not is_allowed(value):
            raise ValueError(f"{name} is {value}, but must be {wanted}.")


def check_cap(objective: Objective, cap: float | None, floor: float | None) -> None:
    """Refuse a cap C, or a smallest ratio, with which an objective cannot limit the importance ratio."""
    if objective.correction in ("none", "full"):
        return
    if cap is None or not 0 < cap < inf:
        raise ValueError(
            f"objective={objective.name!r} limits the ratio, but vllm_importance_sampling_clip_max is {cap}: "
            "give a positive cap C (the paper: 2.0), or use objective='decoupled' for none."
        )
    if floor is not None and not 0 <= floor <= cap:
        raise ValueError(
            f"vllm_importance_sampling_clip_min is {floor}, but must be from 0 to vllm_importance_sampling_clip_max, "
            f"which is {cap}; None means none."
        )
