"""Extra prompts for dynamic sampling, the same in every process; a resumed run continues with the next one."""

import hashlib
import json
from typing import Any, NamedTuple

import torch


class StreamPrompt(NamedTuple):
    """A prompt drawn from the stream."""

    row: dict[str, Any]
    position: int  # prompts drawn so far, including this one


class PromptStream:
    """The dataset's prompts, reshuffled every epoch; set `drawn`, the prompts drawn so far, to continue after them."""

    def __init__(self, dataset: Any, seed: int, drawn: int = 0) -> None:
        if not hasattr(dataset, "__len__"):
            raise ValueError(
                "dynamic_sampling=True cannot draw extra prompts from a streaming dataset: load it with "
                "streaming=False, or set dynamic_sampling=False."
            )
        self._dataset = dataset
        self._seed = seed
        self._epoch, self._order = -1, torch.empty(0)
        self.drawn = drawn

    def draw(self, count: int, tried: set[str]) -> list[StreamPrompt]:
        """Draw the next `count` prompts that are not in `tried`, and add them to it; fewer if none are left."""
        prompts: list[StreamPrompt] = []
        for _ in range(2 * len(self._dataset)):  # the rest of this epoch plus one full epoch
            if len(prompts) == count:
                break
            row = self._dataset[self._next_index()]
            self.drawn += 1
            digest = prompt_digest(row)
            if digest not in tried:
                tried.add(digest)
                prompts.append(StreamPrompt(row, self.drawn))
        return prompts

    def _next_index(self) -> int:
        epoch, position = divmod(self.drawn, len(self._dataset))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self._dataset), generator=generator)
        return int(self._order[position])


def prompt_digest(row: dict[str, Any]) -> str:
    """Return a short hash of a row's prompt that processes can exchange."""
    return hashlib.blake2b(json.dumps(row["prompt"], default=str).encode(), digest_size=8).hexdigest()
