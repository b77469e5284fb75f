"""Image prompts for an engine in the trainer's process.

The trainer's token ids contain one image token per image feature. vLLM expands every placeholder
into such tokens too, so TRL's colocated engine answers a prompt with too many of them. Here the
engine receives only the placeholders, and its expanded prompt must match the one that the trainer
scores. A server receives the image features instead.
"""

from collections.abc import Sequence
from typing import Any

Tokens = list[int]


def plain_prompts(
    processor: Any, conversations: list[Any], prompts: list[Tokens], **template: Any
) -> dict[tuple[int, ...], Tokens]:
    """Map prompts, as the trainer scores them, to the same without the image tokens that the
    processor inserts.

    `template` is passed to `apply_chat_template`.
    """
    plain, tokenizer = {}, processor.tokenizer
    texts = processor.apply_chat_template(
        conversations, add_generation_prompt=True, tokenize=False, **template
    )
    for text, prompt in zip(texts, prompts, strict=True):
        starts = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        plain[tuple(prompt)] = tokenizer(text, add_special_tokens=not starts)["input_ids"]
    return plain


def as_plain(prompt: Tokens, plain: dict[tuple[int, ...], Tokens]) -> Tokens:
    """Return a prompt with unexpanded placeholders. Tokens that an agent has appended are kept."""
    prefix = max(
        (known for known in plain if tuple(prompt[: len(known)]) == known), key=len, default=()
    )
    return [*plain.get(prefix, ()), *prompt[len(prefix) :]]


def check_seen(prompts: Sequence[Tokens], engine_prompts: Sequence[Tokens]) -> None:
    """Raise `ValueError` if the engine answered different prompts from those the trainer scores."""
    for prompt, engine_prompt in zip(prompts, engine_prompts, strict=True):
        if list(prompt) != list(engine_prompt):
            raise ValueError(
                f"The engine answered a prompt of {len(engine_prompt)} tokens where the trainer "
                f"scores one of {len(prompt)}: they insert image tokens differently. Use "
                "vllm_mode='server', which receives image features."
            )
