"""Checks shared by the configurations."""

import warnings
from collections.abc import Callable, Collection
from dataclasses import fields
from difflib import get_close_matches
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

HARMLESS = (
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "max_tokens",
    "skip_special_tokens",
)
"""Those of vLLM's `SamplingParams` that leave a token's distribution alone. Any other may change
it.
"""
NEUTRAL = {"top_p": (1.0, None), "top_k": (0, -1, None), "repetition_penalty": (1.0, None)}
"""Values that turn a sampling parameter off, where it is not only `OFF`."""
OFF: tuple[Any, ...] = (None, 0, "", [], {})
KINDS: dict[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
}
KINDS |= {float: (Real, "a number"), NoneType: (NoneType, "None")}
"""Types of settings that are checked: which values they take, and how a message calls these."""
OTHER_TOKENS = "TRL would read another token's log-probability than the sampled one's."
REFUSED = {
    "n": "num_generations is the number of completions per prompt.",
    "seed": (
        "all completions of a colocated group would be the same. The engine follows the seed "
        "setting."
    ),
    "logprobs": OTHER_TOKENS,
    "logprob_token_ids": OTHER_TOKENS,
}
"""Parameters that `generation_kwargs` must not set, and why."""

DISTRIBUTION = (
    "it changes the distribution that tokens are sampled from, and the trainer computes another one"
)
DRAFTS = (
    "no sync updates a draft model, and the log-probabilities of its tokens were never compared "
    "with the trainer's"
)
ENDS = (
    "the trainer's settings decide how tokens are sampled, and "
    "model.generation_config.eos_token_id where they end"
)
UNFOLLOWED = {
    "logits_processors": DISTRIBUTION,
    "logits_processor_pattern": DISTRIBUTION,
    "watermark_config": DISTRIBUTION,
    "diffusion_config": DISTRIBUTION,
    "speculative_config": DRAFTS,
    "spec_method": DRAFTS,
    "spec_model": DRAFTS,
    "spec_tokens": DRAFTS,
    "generation_config": ENDS,
    "override_generation_config": ENDS,
    "skip_tokenizer_init": "the engine would not know the token that ends a completion",
}
"""Arguments of vLLM's engine that make it sample what the trainer cannot score, and why."""


def check_engine_arguments(names: Collection[str], source: str) -> None:
    """Raise `ValueError` for arguments of an engine, from this source, that the trainer cannot
    follow.
    """
    for name in UNFOLLOWED:
        if name in names:
            raise ValueError(f"{source} sets {name!r}, but {UNFOLLOWED[name]}. Remove it.")


def check_choice(config: object, name: str, choices: Collection[Any], condition: str = "") -> None:
    """Raise `ValueError` if a setting is not in `choices`; the message lists them and suggests the
    closest match.
    """
    value = getattr(config, name)
    if value not in choices:
        near = get_close_matches(str(value), map(str, choices), 1)
        guess = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(
            f"{name} is {value!r}, but{condition} must be one of "
            f"{', '.join(map(repr, choices))}{guess}"
        )


def check_number(
    config: object, name: str, is_allowed: Callable[[Any], bool], requirement: str
) -> None:
    """Raise `ValueError` for a number, other than `None`, that is not allowed; `requirement` says
    what it must be.
    """
    if (value := getattr(config, name)) is not None and not is_allowed(value):
        raise ValueError(f"{name} is {value!r}, but must be {requirement}.")


def check_types(config: Any) -> None:
    """Raise `ValueError` for a number, or True or False, that is something else: YAML and Python do
    not check it.
    """
    hints = get_type_hints(type(config))
    for field in fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        kinds = (hint,) if get_origin(hint) is list else get_args(hint) or (hint,)
        is_bool = isinstance(value, bool) and bool not in kinds  # a number to Python
        if KINDS.keys() >= set(kinds) and (
            is_bool or not isinstance(value, tuple(KINDS[kind][0] for kind in kinds))
        ):
            words = " or ".join(KINDS[kind][1] for kind in kinds)
            raise ValueError(f"{field.name} is {value!r}, but must be {words}.")


def check_sampling(config: Any, stacklevel: int) -> None:
    """Refuse sampling settings that cannot work, and warn of those that make the importance ratio
    wrong.

    The engine reports log-probabilities of the distribution it sampled from, the trainer those over
    the whole vocabulary, at the same `temperature`. If tokens are cut, log ρ is off by log S, where
    S is the mass that remains: https://github.com/huggingface/trl/issues/6789 and
    https://github.com/vllm-project/vllm/issues/42259.
    """
    overrides = config.generation_kwargs or {}
    for name in overrides.keys() & REFUSED.keys():
        raise ValueError(
            f"generation_kwargs sets {name}={overrides[name]!r}, but {REFUSED[name]} Remove it."
        )
    reader = next(
        (name for name in ("mask_truncated_completions", "gamma") if getattr(config, name, None)),
        None,
    )
    if reader and (overrides.get("stop") or overrides.get("stop_token_ids")):
        raise ValueError(
            f"{reader}={getattr(config, reader)} takes completions without an end-of-sequence "
            "token for truncated, like those that stop or stop_token_ids of generation_kwargs end: "
            "leave these out, or add the tokens to the model's generation_config.eos_token_id."
        )
    fields = {
        name: getattr(config, name) for name in (*NEUTRAL, "min_p", "vllm_structured_outputs_regex")
    }
    neutral = NEUTRAL | {"temperature": (config.temperature,)}  # the trainer reads only the field
    biasing = [
        f"generation_kwargs[{name!r}]={value}" if name in overrides else f"{name}={value}"
        for name, value in (fields | overrides).items()
        if name not in HARMLESS and value not in neutral.get(name, OFF)
    ]
    if biasing:
        warnings.warn(
            f"{', '.join(biasing)}: the engine's log-probabilities account for this, but the "
            "trainer's cover the whole vocabulary. The importance ratio is therefore wrong (too "
            "small if tokens are cut), and so are the mismatch/* metrics and every correction. Set "
            "top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0, also in generation_kwargs, "
            "and leave out the others. The temperature setting does no harm.",
            stacklevel=stacklevel + 1,
        )
