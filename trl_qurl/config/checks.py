"""Checks shared by the configurations."""

from collections.abc import Callable, Collection
from difflib import get_close_matches
from math import inf
from typing import Any

from trl_qurl.objective import Objective


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
