"""Sampling settings that cannot work, or that make the importance ratio wrong.

The engine reports log-probabilities of the distribution it sampled from. The trainer follows
`temperature` and, where it can, `CUTTING` (`trainers/listed_tokens.py`), but nothing else:
https://github.com/huggingface/trl/issues/6789 and https://github.com/vllm-project/vllm/issues/42259.
"""

import warnings
from typing import Any

LOWEST_TEMPERATURE = 0.01  # vLLM's

REFUSED = {
    "n": "num_generations is the number of completions per prompt",
    "seed": (
        "all completions of a colocated group would be the same, and the engine follows the seed "
        "setting"
    ),
    "logprobs": "TRL would read another token's log-probability than the sampled one's",
}
"""Parameters that `generation_kwargs` must not set, and why."""

HARMLESS = (
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "max_tokens",
    "skip_special_tokens",
    "detokenize",
)
"""Parameters of vLLM's `SamplingParams` that leave a token's distribution alone. Any other may
change it."""

NEUTRAL = {"top_p": (1.0, None), "top_k": (0, -1, None), "repetition_penalty": (1.0, None)}
"""Values that turn a sampling parameter off, where these are not `OFF`."""
OFF: tuple[Any, ...] = (None, 0, "", [], {})

REGEX = "vllm_structured_outputs_regex"
CUTTING = ("top_k", "top_p", "min_p", REGEX, "structured_outputs")
"""Parameters that cut tokens and leave the others' proportions alone."""


def check_sampling(config: Any, stacklevel: int) -> None:
    """Refuse sampling settings that cannot work; warn if some make the ratio wrong."""
    if config.temperature < LOWEST_TEMPERATURE:
        raise ValueError(
            f"temperature is {config.temperature!r}, but must be at least {LOWEST_TEMPERATURE}, to "
            "which vLLM raises lower ones (0 makes all completions equal)."
        )
    overrides = config.generation_kwargs or {}
    for name, reason in REFUSED.items():
        if name in overrides:
            raise ValueError(
                f"generation_kwargs sets {name}={overrides[name]!r}, but {reason}. Remove it."
            )
    biasing = biasing_settings(config)
    if biasing:
        warnings.warn(
            f"{', '.join(biasing)}: the engine's log-probabilities account for this, but the "
            "trainer's do not. The importance ratio is therefore wrong, and so are the mismatch/* "
            "metrics and every correction. Set repetition_penalty=1.0, also in generation_kwargs, "
            "and leave out the others. Outside generation_kwargs, temperature does no harm.",
            stacklevel=stacklevel + 1,
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
