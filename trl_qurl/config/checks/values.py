"""Checks of single values: a number within its limit, a word among the choices.

Both stand beside the default, in the type of a field. transformers' parser of command lines hands
all of a field's `metadata` to argparse, which knows no limits.
"""

from collections.abc import Callable, Collection
from dataclasses import fields
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints


class Limit(NamedTuple):
    """A requirement for a number; `None` passes."""

    is_allowed: Callable[[Any], bool]
    requirement: str  # the same in words


POSITIVE = Limit(lambda number: number > 0, "positive")
COUNT = Limit(lambda number: number >= 0, "0 or more")
SHARE = Limit(lambda share: 0 <= share <= 1, "in [0, 1]")


def check_values(config: Any) -> None:
    """Raise `ValueError` for a number beyond its limit, or a word that is not among the choices."""
    hints = get_type_hints(type(config), include_extras=True)
    for field in fields(config):
        hint = hints[field.name]
        if get_origin(hint) is Literal:
            check_choice(config, field.name, get_args(hint))
        for limit in getattr(hint, "__metadata__", ()):  # of an `Annotated` type
            _check_number(field.name, getattr(config, field.name), limit)


def check_choice(config: Any, name: str, choices: Collection[Any], condition: str = "") -> None:
    """Raise `ValueError` if a setting is not in `choices`, which the message lists."""
    value = getattr(config, name)
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{name} is {value!r}, but{condition} must be one of {listed}.")


def _check_number(name: str, value: Any, limit: Limit) -> None:
    if value is None:
        return
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not limit.is_allowed(value):
        raise ValueError(f"{name} is {value!r}, but must be {limit.requirement}.")
