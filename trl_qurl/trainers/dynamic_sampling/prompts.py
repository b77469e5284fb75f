"""Further prompts for dynamic sampling, the same in every process; a resumed run continues with the next one."""

import hashlib
import json
from typing import Any, NamedTuple

import torch


class Drawn(NamedTuple):
    """A prompt from the stream."""

    row: dict[str, Any]
    drawn: int  # prompts that the stream had given with this one


class PromptStream:
    """The data set in one random order after another; set `drawn`, the prompts drawn so far, to go on after them."""

    def __init__(self, dataset: Any, seed: int, drawn: int = 0) -> None:
        if not hasattr(dataset, "__len__"):
            raise ValueError(
                "dynamic_sampling=True cannot draw further prompts from a streamed data set: load it with "
                "streaming=False, or set dynamic_sampling=False."
            )
        self._dataset = dataset
        self._seed = seed
        self._epoch, self._order = -1, torch.empty(0)
        self.drawn = drawn

    def draw(self, count: int, tried: set[str]) -> list[Drawn]:
        """The next prompts that are not among those tried, which they join; fewer if the data set has no more."""
        found: list[Drawn] = []
        for _ in range(2 * len(self._dataset)):  # two orders: what is left of this one, and one whole
            if len(found) == count:
                break
            row = self._dataset[self._number()]
            self.drawn += 1
            name = prompt_digest(row)
            if name not in tried:
                tried.add(name)
                found.append(Drawn(row, self.drawn))
        return found

    def _number(self) -> int:
        epoch, place = divmod(self.drawn, len(self._dataset))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self._dataset), generator=generator)
        return int(self._order[place])


def prompt_digest(row: dict[str, Any]) -> str:
    """Short name of a row's prompt, which processes exchange."""
    return hashlib.blake2b(json.dumps(row["prompt"], default=str).encode(), digest_size=8).hexdigest()
