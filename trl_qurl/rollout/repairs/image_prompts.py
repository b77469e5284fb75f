"""Image prompts that TRL's colocated engine gets with too many image tokens (report 5).

The trainer's token ids contain one image token per image feature. vLLM expands every placeholder
into such tokens too, so without this repair the engine answers other prompts. Here it receives only
the placeholders, and its expanded prompt must match the one that the trainer scores. A server
receives the image features instead.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import ProcessorMixin

REPORTS = (5,)
SEEN_IN = "trl 1.16"
UNNECESSARY_FROM = None

Tokens = list[int]


def plain_prompts(
    processor: "ProcessorMixin", conversations: list[Any], prompts: list[Tokens], **template: Any
) -> dict[tuple[int, ...], Tokens]:
    """Map prompts, as the trainer scores them, to the same without inserted image tokens.

    `template` is passed to `apply_chat_template`.
    """
    tokenizer = processor.tokenizer
    texts = processor.apply_chat_template(
        conversations, add_generation_prompt=True, tokenize=False, **template
    )
    plain = {}
    for text, prompt in zip(texts, prompts, strict=True):
        begins = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        plain[tuple(prompt)] = tokenizer(text, add_special_tokens=not begins)["input_ids"]
    return plain


def as_plain(prompt: Tokens, plain: Mapping[tuple[int, ...], Tokens]) -> Tokens:
    """Return a prompt with unexpanded placeholders. Tokens that an agent has appended are kept."""
    prefixes = [known for known in plain if tuple(prompt[: len(known)]) == known]
    if not prefixes:
        return list(prompt)
    prefix = max(prefixes, key=len)
    return [*plain[prefix], *prompt[len(prefix) :]]


def check_seen(prompts: Sequence[Tokens], engine_prompts: Sequence[Tokens]) -> None:
    """Raise `ValueError` if the engine answered different prompts from those the trainer scores."""
    for prompt, engine_prompt in zip(prompts, engine_prompts, strict=True):
        if list(prompt) != list(engine_prompt):
            raise ValueError(
                f"The engine answered a prompt of {len(engine_prompt)} tokens where the trainer "
                f"scores one of {len(prompt)}: they insert image tokens differently. Use "
                "vllm_mode='server', which receives image features."
            )
