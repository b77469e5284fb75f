"""What a process with an engine is asked for, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Job:
    """Let one engine answer.

    Attributes:
        model: Directory of the checkpoint that vLLM loads.
        prompts: Token ids, each as often as it is to be answered.
        max_tokens: Longest answer.
        seed: Of the sampling.
        engine_kwargs: Arguments of `vllm.LLM`.
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
    logps: list[float]  # of these tokens under the engine, in nats, (T,)
    likeliest: list[int]  # the engine's likeliest token at each step, (T,)
