"""The request to an engine process, and its answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Job:
    """Prompts for one engine to answer.

    Attributes:
        model: Directory of the checkpoint that vLLM loads.
        prompts: Token ids of each prompt, repeated once per answer.
        max_tokens: Longest answer, in tokens.
        seed: Sampling seed.
        engine_kwargs: Arguments for `vllm.LLM`.
    """

    model: str
    prompts: list[list[int]]
    max_tokens: int
    seed: int
    engine_kwargs: dict[str, Any] = field(default_factory=dict)


class Answer(NamedTuple):
    """An answer of `T` tokens."""

    prompt: list[int]
    tokens: list[int]  # (T,)
    logps: list[float]  # log-probabilities of the tokens under the engine, in nats, (T,)
    likeliest: list[int]  # the engine's most likely token at each step, (T,)
