"""Score centering (arXiv 2609.20807), as an addition to a trainer of the study.

    loss += A · Σ_v sg(m_v − α · p_v) · log p_v

Where v are the K tokens that the actor finds likeliest, p is the policy, q the actor, and sg stops
the gradient. Without a correction m = q, with truncated importance sampling m = min(p, C · q). α is
the ratio of what is left of m's and of p's mass outside of the K tokens. On average over samples of
q, the term takes away what the gradient of log p has because q is not p.

A pass of its own computes all logits, which the tiny model of the study can afford.
"""

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

SMALLEST_MASS = 1e-6  # outside of the listed tokens


def center(trainer: Any, listed: int) -> None:
    """Add the term to the trainer's loss, from the actor's `listed` likeliest tokens."""
    generation = trainer.vllm_generation
    generate, score = generation.generate, trainer._generate_and_score_completions
    found: dict[str, torch.Tensor] = {}

    def generate_and_keep(*args: Any, **kwargs: Any) -> Any:
        result = generate(*args, **kwargs)
        found.update(likeliest(result.logprobs, result.logprob_token_ids))
        sampled = [
            [[logps[ids.index(token)]] for token, logps, ids in zip(*completion, strict=True)]
            for completion in zip(
                result.completion_ids, result.logprobs, result.logprob_token_ids, strict=True
            )
        ]
        return result._replace(logprobs=sampled)

    def score_and_keep(inputs: Any) -> Any:
        return score(inputs) | found

    def weigh(logps: torch.Tensor, inputs: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return logps
        term = centering_term(trainer, inputs)
        # TRL's loss multiplies the gradient of what it is given by the token's weight.
        weight = inputs["importance_sampling_ratio"].clamp(min=SMALLEST_MASS)
        return logps - (term - term.detach()) / weight

    generation.logprobs = listed
    generation.generate = generate_and_keep
    trainer._generate_and_score_completions = score_and_keep
    trainer._weigh = weigh


def likeliest(logps: list[list[list[float]]], ids: list[list[list[int]]]) -> dict[str, Any]:
    """Return the listed tokens of a batch, (B, T, K + 1): their ids, and log q, -inf for none."""

    def padded(rows: list[list[list[Any]]], value: float, dtype: torch.dtype) -> torch.Tensor:
        width = max(len(token) for row in rows for token in row)
        full = [[[*token, *[value] * (width - len(token))] for token in row] for row in rows]
        return pad_sequence(
            [torch.tensor(row, dtype=dtype) for row in full], True, padding_value=value
        )

    return {
        "likeliest_logps": padded(logps, -torch.inf, torch.float32),
        "likeliest_ids": padded(ids, 0, torch.long),
    }


def centering_term(trainer: Any, inputs: Any) -> torch.Tensor:
    """Return Σ_v sg(m_v − α · p_v) · log p_v of each token, (B, T)."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    length = inputs["completion_ids"].size(1)
    model = trainer.accelerator.unwrap_model(trainer.model)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1].float()
    logps = (logits / trainer.temperature).log_softmax(-1).gather(-1, inputs["likeliest_ids"])
    is_listed = inputs["likeliest_logps"] > -torch.inf  # (B, T, K + 1)
    q = inputs["likeliest_logps"].exp()
    p = logps.detach().exp() * is_listed
    outside = (1 - q.sum(-1)).clamp(min=0) / (1 - p.sum(-1)).clamp(min=SMALLEST_MASS)  # (B, T)
    m = q
    if trainer.args.objective == "tis":
        cap = trainer.args.importance_cap
        m = torch.minimum(p, cap * q)
        outside = (cap * outside).clamp(max=1)
    factor = (m - outside[..., None] * p) * is_listed
    return (factor * logps.masked_fill(~is_listed, 0)).sum(-1)
