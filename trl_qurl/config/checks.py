"""Checks that the configurations share."""

from collections.abc import Callable, Collection
from difflib import get_close_matches
from typing import Any


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
