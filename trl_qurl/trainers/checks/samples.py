"""Score the beginnings of a few samples with the policy, for a proof of the engine's function."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from trl.trainer.utils import selective_log_softmax

from trl_qurl.rollout.mismatch import MismatchTally
from trl_qurl.rollout.samples import Listing, Samples
from trl_qurl.trainers.listed_tokens import list_tokens, over_lists
from trl_qurl.trainers.scoring import cap_of

SCORED_SAMPLES = 8  # completions
SCORED_TOKENS = 64  # of each, from its beginning


class ScoredTokens(NamedTuple):
    """The two log-probabilities of a completion's tokens, (1, T) each, in nats."""

    proximal_logps: torch.Tensor
    behavior_logps: torch.Tensor  # NaN where the engine returned no valid value
    mask: torch.Tensor  # bool, all true


def mismatch_of_samples(trainer: Any, samples: Samples) -> dict[str, float]:
    """Return how far the engine is from a trainer's policy, by the beginnings of a few completions.

    Empty if a process has none, or with images, which the policy would need as well. A collective
    operation.
    """
    is_useless = samples.has_images or not any(samples.completions)
    useless = torch.tensor([float(is_useless)], device=trainer.accelerator.device)
    if trainer._sum_over_processes(useless).item():
        return {}
    generation = trainer.vllm_generation
    tally = MismatchTally(trainer.accelerator)
    with generation.cost.timed("check_s"):
        for scored in scored_samples(trainer, samples):
            tally.add(*scored, cap_of(trainer.args))
    return tally.pop()


@torch.no_grad()
def scored_samples(trainer: Any, samples: Samples) -> Iterator[ScoredTokens]:
    """Score the beginnings of a few completions with the policy, one forward pass each.

    A collective operation where the model is sharded, because all processes have as many samples.
    """
    every = max(1, len(samples.prompts) // SCORED_SAMPLES)  # those of one prompt are neighbors
    chosen = range(0, len(samples.prompts), every)[:SCORED_SAMPLES]
    model = trainer.model
    was_training = model.training
    model.eval()  # the engine has no dropout either
    try:
        for number in chosen:
            yield scored_sample(trainer, samples, number)
    finally:
        model.train(was_training)


def scored_sample(trainer: Any, samples: Samples, number: int) -> ScoredTokens:
    """Score the first T tokens of a completion with the policy, in one forward pass."""
    model = trainer.model
    completion = samples.completions[number][:SCORED_TOKENS]
    length = len(completion)
    ids = torch.tensor([samples.prompts[number] + completion], device=model.device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=length + 1).logits[:, :-1]
    logits = logits.float() / trainer.vllm_generation.temperature  # (1, T, vocabulary)
    targets = ids[:, ids.size(1) - length :]
    proximal_logps = selective_log_softmax(logits, targets)
    logps, listed_ids = (part[:length] for part in samples.listings[number])
    if trainer._listed_count:
        listed = list_tokens([Listing(logps, listed_ids)], length, model.device)
        proximal_logps = over_lists(proximal_logps, logits, listed)
    behavior_logps = logps[:, 0].unsqueeze(0).to(model.device)
    mask = torch.ones_like(targets, dtype=torch.bool)
    return ScoredTokens(proximal_logps, behavior_logps, mask)
