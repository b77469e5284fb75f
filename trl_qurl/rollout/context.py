"""What belongs to one rollout, from its prompts to the scored batch, and to nothing else.

TRL has no argument for these values on their way between the trainer and its backend. The backend holds the context of
the current rollout (`QuantizedVLLMGeneration.current`), and replaces it before and after each one.
"""

from dataclasses import dataclass, field

import torch

from trl_qurl.rollout.sync import RolloutCost

Tokens = list[list[int]]


@dataclass
class RolloutContext:
    """One rollout of this process. `B` sequences, `T` completion tokens."""

    cost: RolloutCost = field(default_factory=RolloutCost)  # since the last rollout
    used_engine: bool = False  # whether it has synced or generated

    # Before it is generated
    upcoming: Tokens | None = None  # prompts of the next rollout, to begin ahead; empty if none follows
    plain_prompts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # without the tokens of images
    generated: tuple | None = None  # what TRL's `_generate` returns, if dynamic sampling has generated it before

    # Afterwards
    behavior_logps: list[list[list[float | None]]] | None = None  # of the latest completions, as the engine returned
    rewards: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # (B · processes, functions)
