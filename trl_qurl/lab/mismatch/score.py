"""Score an engine's answers under the full-precision policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from trl_qurl.lab.mismatch.job import Answer

if TYPE_CHECKING:
    import torch


class Scored(NamedTuple):
    """One answer of `T` tokens under both policies."""

    behavior_logps: torch.Tensor  # under the engine, in nats, (T,)
    proximal_logps: torch.Tensor  # under the full-precision policy, in nats, (T,)
    agrees: torch.Tensor  # whether both have the same most likely token, bool, (T,)
    question: tuple[int, ...]  # prompt tokens


def score(model: Any, answers: Iterable[Answer]) -> Iterator[Scored]:
    """Score each answer with one forward pass over its prompt and its tokens.

    Answers are not batched: padding would make a row depend on its neighbors, adding to the effect being measured.
    """
    import torch

    for answer in answers:
        count = len(answer.tokens)
        if count == 0:
            continue
        tokens = torch.tensor([answer.prompt + answer.tokens], device=model.device)  # (1, P + T)
        with torch.inference_mode():
            logits = model(input_ids=tokens, logits_to_keep=count + 1).logits[0, :-1].float()  # (T, V)
        logps = logits.log_softmax(-1)
        chosen = logps.gather(-1, tokens[0, -count:, None]).squeeze(-1).cpu()
        likeliest = logits.argmax(-1).cpu()
        agrees = likeliest == torch.tensor(answer.likeliest)
        yield Scored(torch.tensor(answer.logps), chosen, agrees, tuple(answer.prompt))
