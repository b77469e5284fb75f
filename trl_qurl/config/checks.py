"""Checks that the configurations share; the tables of what is refused are in `refusals`."""

import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from trl_qurl.config.refusals import (
    GROUP_NUMBERS,
    NUMBERS,
    SAMPLING_PARAMETERS,
    UNFOLLOWED,
    Conflict,
    Number,
)

HARMLESS = (
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "max_tokens",
    "skip_special_tokens",
)
"""Parameters of vLLM's `SamplingParams` that leave a token's distribution alone. Any other may
change it."""

NEUTRAL = {"top_p": (1.0, None), "top_k": (0, -1, None), "repetition_penalty": (1.0, None)}
"""Values that turn a sampling parameter off, where these are not `OFF`."""
OFF: tuple[Any, ...] = (None, 0, "", [], {})

REGEX = "vllm_structured_outputs_regex"
CUTTING = ("top_k", "top_p", "min_p", REGEX, "structured_outputs")
"""Parameters that cut tokens and leave the others' proportions alone."""


class Kind(NamedTuple):
    """A type of settings that is checked."""

    accepted: type
    words: str  # what messages call it


KINDS = {
    bool: Kind(bool, "True or False"),
    int: Kind(Integral, "a whole number"),
    float: Kind(Real, "a number"),
    NoneType: Kind(NoneType, "None"),
}


def check_choice(config: object, name: str, choices: Collection[Any], condition: str = "") -> None:
    """Raise `ValueError` if a setting is not in `choices`.

    The message lists these, and suggests the closest one.
    """
    value = getattr(config, name)
    if value in choices:
        return
    near = get_close_matches(str(value), map(str, choices), 1)
    guess = f"; did you mean {near[0]!r}?" if near else "."
    raise ValueError(
        f"{name} is {value!r}, but{condition} must be one of {', '.join(map(repr, choices))}{guess}"
    )


def check_numbers(config: object, numbers: Mapping[str, Number]) -> None:
    """Raise `ValueError` for a number, other than `None`, that is not allowed."""
    for name, number in numbers.items():
        value = getattr(config, name)
        if value is not None and not number.is_allowed(value):
            raise ValueError(f"{name} is {value!r}, but must be {number.requirement}.")


def check_conflicts(config: object, conflicts: Iterable[Conflict]) -> None:
    """Raise `ValueError` for the first conflict that a configuration has."""
    for conflict in conflicts:
        if conflict.occurs(config):
            raise ValueError(
                f"{conflict.given(config)} cannot work: {conflict.reason}. {conflict.way_out}."
            )


def check_types(config: Any) -> None:
    """Raise `ValueError` for a number, or True or False, that is something else.

    YAML and Python do not check it.
    """
    hints = get_type_hints(type(config))
    for field in fields(config):
        hint = hints[field.name]
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if not all(kind in KINDS for kind in kinds):
            continue
        value = getattr(config, field.name)
        if not any(_accepts(kind, value) for kind in kinds):
            words = " or ".join(KINDS[kind].words for kind in kinds)
            raise ValueError(f"{field.name} is {value!r}, but must be {words}.")


def _accepts(kind: type, value: Any) -> bool:
    if isinstance(value, bool):  # a number to Python
        return kind is bool
    return isinstance(value, KINDS[kind].accepted)


def check_engine_arguments(names: Collection[str], source: str) -> None:
    """Raise `ValueError` for arguments of an engine that the trainer cannot follow.

    `source` is where they are from.
    """
    for name, reason in UNFOLLOWED.items():
        if name in names:
            raise ValueError(f"{source} sets {name!r}, but {reason}. Remove it.")


def check_sampling(config: Any, stacklevel: int) -> None:
    """Refuse sampling settings that cannot work, and warn of those that make the ratio wrong.

    The engine reports log-probabilities of the distribution it sampled from. The trainer follows
    `temperature` and, where it can, `CUTTING` (`trainers/listed_tokens.py`), but nothing else:
    https://github.com/huggingface/trl/issues/6789 and
    https://github.com/vllm-project/vllm/issues/42259.
    """
    overrides = config.generation_kwargs or {}
    if not isinstance(overrides, Mapping):
        raise ValueError(
            f"generation_kwargs is {overrides!r}, but must be a dictionary of sampling parameters, "
            "such as {'stop': ['\\n\\n']}."
        )
    for name, value in overrides.items():
        if name in SAMPLING_PARAMETERS:
            raise ValueError(
                f"generation_kwargs sets {name}={value!r}, but {SAMPLING_PARAMETERS[name]}. "
                "Remove it."
            )
    _check_overrides(overrides)
    if overrides.get("stop") or overrides.get("stop_token_ids"):
        _check_ends(config)
    biasing = biasing_settings(config)
    if biasing:
        warnings.warn(
            f"{', '.join(biasing)}: the engine's log-probabilities account for this, but the "
            "trainer's do not. The importance ratio is therefore wrong, and so are the mismatch/* "
            "metrics and every correction. Set repetition_penalty=1.0, also in generation_kwargs, "
            "and leave out the others. Outside generation_kwargs, temperature does no harm.",
            stacklevel=stacklevel + 1,
        )


def _check_overrides(overrides: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a sampling parameter is not what the setting of its name must be."""
    for name, number in (NUMBERS | GROUP_NUMBERS).items():
        if name not in overrides:
            continue
        value = overrides[name]
        kind = int if name == "top_k" else float
        if not _accepts(kind, value) or not number.is_allowed(value):
            raise ValueError(
                f"generation_kwargs sets {name}={value!r}, but it must be {number.requirement}."
            )


def _check_ends(config: Any) -> None:
    """Raise `ValueError` if completions that stop in another way would count as truncated."""
    for name in ("mask_truncated_completions", "gamma"):
        value = getattr(config, name, None)
        if value:
            raise ValueError(
                f"{name}={value} takes completions without an end-of-sequence token for truncated, "
                "like those that stop or stop_token_ids of generation_kwargs end: leave these out, "
                "or add the tokens to the model's generation_config.eos_token_id."
            )


def biasing_settings(config: Any) -> list[str]:
    """Return the settings, with values, that change the distribution as no trainer follows."""
    return [label for name, (label, _) in _changing(config).items() if name not in CUTTING]


def cutting_settings(config: Any) -> dict[str, Any]:
    """Return the settings that cut tokens from the distribution."""
    return {name: value for name, (_, value) in _changing(config).items() if name in CUTTING}


def _changing(config: Any) -> dict[str, tuple[str, Any]]:
    """Return what changes the distribution tokens are sampled from: by name, text and value."""
    overrides = getattr(config, "generation_kwargs", None) or {}
    names = (*NEUTRAL, "min_p", REGEX)
    values = {name: getattr(config, name, None) for name in names} | dict(overrides)
    # The trainer reads the temperature from the field.
    neutral = NEUTRAL | {"temperature": (getattr(config, "temperature", None),)}
    changing = {}
    for name, value in values.items():
        if name not in HARMLESS and value not in neutral.get(name, OFF):
            label = f"generation_kwargs[{name!r}]" if name in overrides else name
            changing[name] = (f"{label}={value}", value)
    return changing
