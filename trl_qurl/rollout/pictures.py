"""Prompts with pictures for an engine in the trainer's process.

The trainer's token ids hold as many image tokens as a picture has features. vLLM puts them in by itself, wherever it
finds a placeholder, so TRL's colocated engine answers a prompt with image tokens to spare. Here it is sent the
placeholders alone, and has to answer the prompt that the trainer scores. A server is sent the features themselves.
"""

from collections.abc import Sequence
from typing import Any

Tokens = list[int]


class PicturePrompts:
    """The prompts of one rollout that have pictures, with their placeholders."""

    def __init__(self) -> None:
        self._plain: dict[tuple[int, ...], Tokens] = {}

    def tokenize(
        self, processor: Any, conversations: Sequence[Any], prompts: Sequence[Tokens], **template: Any
    ) -> None:
        """Remember the prompts of conversations without what the processor puts in for pictures.

        Args:
            processor: The trainer's.
            conversations: Messages of each prompt.
            prompts: Token ids of each, as the trainer scores them.
            **template: Further arguments of `apply_chat_template`.
        """
        tokenizer = processor.tokenizer
        texts = processor.apply_chat_template(
            list(conversations), add_generation_prompt=True, tokenize=False, **template
        )
        self._plain = {}
        for text, prompt in zip(texts, prompts, strict=True):
            starts = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
            self._plain[tuple(prompt)] = tokenizer(text, add_special_tokens=not starts)["input_ids"]

    def plain(self, prompt: Tokens) -> Tokens:
        """A prompt as the engine takes it; what an agent has added to one stays."""
        begun = [known for known in self._plain if tuple(prompt[: len(known)]) == known]
        known = max(begun, key=len, default=())
        return [*self._plain.get(known, ()), *prompt[len(known) :]]


def check_seen(sent: Sequence[Tokens], seen: Sequence[Tokens]) -> None:
    """Raise `ValueError` if an engine answered other prompts than the trainer scores."""
    for prompt, answered in zip(sent, seen, strict=True):
        if list(prompt) != list(answered):
            raise ValueError(
                f"The engine answered a prompt of {len(answered)} tokens where the trainer scores one of "
                f"{len(prompt)}: they put pictures into prompts in different ways. Use vllm_mode='server', to which "
                "features of pictures are sent."
            )
