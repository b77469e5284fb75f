"""Reward functions by name, as `trl grpo` takes them, and TRL's soft overlong punishment."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

GRADING = {"accuracy_reward", "reasoning_accuracy_reward"}
"""Reward functions that compare answers with those of the data."""

Reward = Callable[..., list[float]]


def load_rewards(names: Sequence[str]) -> list[Reward]:
    """Return reward functions by import path, or by a name of `trl.rewards`, of which
    `accuracy_reward` is ours.
    """
    from trl.rewards import get_soft_overlong_punishment

    from trl_qurl.lab.grading import accuracy_reward

    sys.path.insert(0, "")  # this, and the two numbers, as in `trl grpo`
    registry = {
        "accuracy_reward": accuracy_reward,
        "get_soft_overlong_punishment": get_soft_overlong_punishment(1280, 256),
    }
    return [registry.get(name) or _imported(name) for name in names]


def _imported(name: str) -> Reward:
    module, _, function = name.rpartition(".")
    try:
        reward = getattr(import_module(module or "trl.rewards"), function)
    except Exception as error:  # whatever a module of the user's raises
        raise ValueError(
            f"--reward_funcs {name} cannot be loaded ({type(error).__name__}: {error}): give the "
            "import path of a function, such as my_rewards.length, or a name that --help lists."
        ) from error
    if not callable(reward):
        raise ValueError(f"--reward_funcs {name} is {reward!r}: give the path of a function.")
    return reward


def punishment(cache: int, limit: int) -> Reward:
    """Return TRL's soft overlong punishment, which begins `cache` tokens before `limit`."""
    from trl.rewards import get_soft_overlong_punishment

    if not 0 < cache < limit:
        raise ValueError(
            f"soft_overlong_cache={cache} must be between 0 and max_completion_length={limit}."
        )
    return get_soft_overlong_punishment(limit, cache)
