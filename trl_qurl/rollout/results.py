"""Results of TRL's functions, by name: an element more or less is a `TypeError`."""

from __future__ import annotations

from typing import Any, NamedTuple


class Completions(NamedTuple):
    """What `VLLMGeneration.generate` returns, one entry per completion."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: Any  # by token: lists, of the sampled one and others, in nats
    logprob_token_ids: Any  # lists of these tokens, or `None`


class Generated(NamedTuple):
    """What `GRPOTrainer._generate` returns, one entry per completion."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_mask: list[list[int]] | None
    completions: list[Any]  # texts or conversations
    logprobs: list[list[float | None]] | None  # of the sampled tokens, in nats
    extra_fields: dict[str, Any]
    images: list[Any] | None
    tool_images: list[Any]
