"""Checks that the configurations share."""

from typing import Any


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """
    Raises:
        ValueError: The setting has another value than those allowed.
    """
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(map(repr, choices))}.")


def as_dictionary(name: str, value: dict[str, Any] | str | None, example: str) -> dict[str, Any]:
    """A setting that the command line gives as JSON, as a dictionary.

    Raises:
        ValueError: It is a text that is no JSON dictionary.
    """
    if isinstance(value, str):
        raise ValueError(f"{name} is {value!r}: write a JSON dictionary, such as '{example}'.")
    return dict(value or {})
