"""Checks that the configurations share."""

import json
from collections.abc import Collection
from difflib import get_close_matches
from typing import Any


def check_choice(name: str, value: str | None, choices: Collection[str | None]) -> None:
    """Refuse a value that is not among those allowed.

    Args:
        name: The setting.
        value: Its value.
        choices: What is allowed.

    Raises:
        ValueError: The value is not one of them; the message lists them, and names one that is spelled like it.
    """
    if value in choices:
        return
    near = get_close_matches(str(value), [choice for choice in choices if choice is not None], 1)
    guess = f"; did you mean {near[0]!r}?" if near else "."
    raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(map(repr, choices))}{guess}")


def as_dictionary(name: str, value: dict[str, Any] | str | None, example: str) -> dict[str, Any]:
    """Return a setting as a dictionary; the command line gives it as JSON.

    Raises:
        ValueError: The text is not a JSON dictionary.
    """
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            parsed = None
        if not isinstance(parsed, dict):
            raise ValueError(f"{name} is {value!r}: write a JSON dictionary, such as '{example}'.")
        value = parsed
    return dict(value or {})
