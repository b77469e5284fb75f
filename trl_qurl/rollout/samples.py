"""What an engine has sampled: tokens, and how likely it found them.

vLLM makes no text of them here, because TRL decodes whole completions, and no object of each
log-probability. For a small model, both take longer than all else that the trainer's process does
for a token (benchmarks/speed.md).
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trl_qurl.rollout.mismatch import valid_logps
from trl_qurl.rollout.results import Completions

if TYPE_CHECKING:
    from vllm import RequestOutput

Tokens = list[list[int]]


class Listing(NamedTuple):
    """What the engine lists at the T tokens of a completion: K tokens of its vocabulary at each.

    The first is the one it sampled, which may be there again.
    """

    logps: torch.Tensor  # (T, K), in nats; NaN where the engine returned no valid value
    ids: torch.Tensor  # (T, K)

    @classmethod
    def of(cls, logps: list[float], ids: list[int], length: int) -> "Listing":
        """Return the listing of a completion of this length from its rows, one after the other."""
        shape = (length, len(ids) // length if length else 1)
        return cls(
            valid_logps(torch.tensor(logps)).view(shape),
            torch.tensor(ids, dtype=torch.int64).view(shape),
        )


class Samples(NamedTuple):
    """What this process's completions were sampled from, and how likely the actor found them."""

    prompts: Tokens
    completions: Tokens
    listings: list[Listing]
    has_images: bool


def sampling_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Return the user's arguments for vLLM's `SamplingParams`, and those that save time."""
    return {"detokenize": bool(given.get("stop")), **given, "flat_logprobs": True}


def read_outputs(outputs: "list[RequestOutput]") -> tuple[list[Listing], None]:
    """Return what TRL's `extract_logprobs` does, with a listing for each completion."""
    flats = [each.logprobs for output in outputs for each in output.outputs]
    return [Listing.of(flat.logprobs, flat.token_ids, len(flat)) for flat in flats], None


def read_lists(completions: Completions, listed: int) -> list[Listing]:
    """Return listings of at most `listed` tokens beside the sampled one, from a server's lists.

    These are sorted by likelihood.
    """
    listings = []
    rows = zip(
        completions.completion_ids,
        completions.logprobs,
        completions.logprob_token_ids,
        strict=True,
    )
    for sampled, logp_lists, id_lists in rows:
        width = min([listed, *map(len, id_lists)])
        logps: list[float] = []
        ids: list[int] = []
        for token, of_logps, of_ids in zip(sampled, logp_lists, id_lists, strict=True):
            own = of_logps[of_ids.index(token)]
            logps += [math.nan if logp is None else logp for logp in (own, *of_logps[:width])]
            ids += [token, *of_ids[:width]]
        listings.append(Listing.of(logps, ids, len(sampled)))
    return listings
