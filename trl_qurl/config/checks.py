"""Checks that the configurations share."""

import json
from typing import Any


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not among those allowed.

    Raises:
        ValueError: The value is not one of them.
    """
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(map(repr, choices))}.")


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
