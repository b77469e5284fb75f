"""Reward functions by name, as `trl grpo` takes them, and TRL's soft overlong punishment."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_qurl import QuRLGRPOConfig, QuRLRLOOConfig

GRADING = {"accuracy_reward", "reasoning_accuracy_reward"}
"""Reward functions that compare answers with those of the data."""


def load_rewards(names: Sequence[str]) -> list[Any]:
    """Return reward functions by import path, or by a name of `trl.rewards`, of which
    `accuracy_reward` is ours.
    """
    from trl.rewards import get_soft_overlong_punishment

    from trl_qurl.lab.grading import accuracy_reward

    sys.path.insert(0, "")  # this, and the two numbers, as in `trl grpo`
    overlong = get_soft_overlong_punishment(1280, 256)
    ours, loaded = (
        {"accuracy_reward": accuracy_reward, "get_soft_overlong_punishment": overlong},
        [],
    )
    for path in (name.replace(":", ".") for name in names):
        module, _, name = f"{'' if '.' in path else 'trl.rewards.'}{path}".rpartition(".")
        try:
            loaded.append(
                ours.get(path) or attrgetter(name, f"{name}.__call__")(import_module(module))[0]
            )
        except (ImportError, AttributeError) as error:
            ways = (
                "give the import path of a function, such as my_rewards.length, or a name that "
                "--help lists"
            )
            raise ValueError(
                f"--reward_funcs {path} cannot be loaded ({error}): {ways}."
            ) from error
    return loaded


def punishments(
    soft_overlong_cache: int | None, training_args: QuRLGRPOConfig | QuRLRLOOConfig
) -> list[Any]:
    """Build TRL's soft overlong punishment, if requested."""
    from trl.rewards import get_soft_overlong_punishment

    if soft_overlong_cache is None:
        return []
    limit = training_args.max_completion_length
    if limit is None or not 0 < soft_overlong_cache < limit:
        raise ValueError(
            f"soft_overlong_cache={soft_overlong_cache} must be between 0 and "
            f"max_completion_length={limit}."
        )
    return [get_soft_overlong_punishment(limit, soft_overlong_cache)]
