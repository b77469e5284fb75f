"""Score completions: log-probabilities (B, T), what is learned from, and metrics of an update."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from trl.trainer.utils import selective_log_softmax

from trl_qurl.objective import importance_ratio
from trl_qurl.rollout.backend import Samples
from trl_qurl.rollout.mismatch import MismatchTally, valid_logps
from trl_qurl.trainers.listed_tokens import ListedTokens, list_tokens, over_lists

Batch = dict[str, Any]  # of TRL's trainers: tensors, (B, ...) each

SCORED_SAMPLES = 8  # completions that are compared for a proof
SCORED_TOKENS = 64  # of each, from its beginning


@dataclass
class PolicyPass:
    """A trainer's forward passes inside a block, of which the first is kept.

    Before an update, that may be the reference model's, if none is made in advance: nobody reads it
    then.
    """

    teaches_smoothing: bool  # whether smoothing learns from the first
    inputs: Batch | None = None  # of TRL's loss, if the passes are inside it
    completes_inputs: bool = False  # whether the first completes them
    logps: torch.Tensor | None = None  # of the first, (B, T), without gradient
    listed: ListedTokens | None = None  # of the completions
    reads_lists: bool = False  # whether these are the engine's latest, read when they are needed
    seconds: float = 0.0


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
    behavior = samples.behavior_logps[number][:length]
    if trainer._listed_count and samples.behavior_ids:
        listing = (behavior, samples.behavior_ids[number][:length])
        listed = list_tokens([listing], length, model.device)
        proximal_logps = over_lists(proximal_logps, logits, listed)
    [valid] = valid_logps([[token[0] for token in behavior]])
    known = [math.nan if logp is None else logp for logp in valid]
    behavior_logps = torch.tensor([known], device=model.device)
    mask = torch.ones_like(targets, dtype=torch.bool)
    return ScoredTokens(proximal_logps, behavior_logps, mask)


def learned_tokens(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mask the completion tokens to learn from, bool (B, T): no padding, and no tool output."""
    return (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()


def cap_of(args: Any) -> float:
    """Return the cap C of a config, a ratio; infinite for `None`."""
    return math.inf if args.importance_cap is None else args.importance_cap


def loss_metrics(
    policy_logps: torch.Tensor,
    proximal_logps: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    sum_over_processes: Callable[[torch.Tensor], torch.Tensor],
    lifting: tuple[float, float] | None = None,
) -> dict[str, float]:
    """Return metrics of an update on B sequences of T completion tokens.

    `policy/approx_kl` estimates KL(π_prox ‖ π_θ) in nats per token by k3, R − 1 − log R with
    R = π_θ/π_prox (Schulman 2020, "Approximating KL Divergence"). `acr/*` are shares of all tokens
    learned from: those whose upper bound ACR lifted, and the subset of these that TIS would have
    clipped.

    Args:
        policy_logps: Of the policy, (B, T).
        proximal_logps: Of the policy at rollout time, (B, T).
        inputs: Of the loss.
        sum_over_processes: Adds up a tensor over all processes.
        lifting: With ACR, the cap C, and the bound 1 + ε_high that it lifts.
    """
    learned = learned_tokens(inputs)
    log_ratio = (policy_logps - proximal_logps).masked_fill(~learned, 0.0).double()  # (B, T)
    parts = {"policy/approx_kl": log_ratio.expm1() - log_ratio}  # (B, T) each
    if lifting is not None:
        cap, bound = lifting
        advantages = inputs["advantages"].reshape(len(learned), -1)  # (B, T) or (B, 1)
        rho = importance_ratio(proximal_logps, inputs["sampling_per_token_logps"])  # (B, T)
        lifted = learned & (rho > cap)
        is_clipped = torch.exp(policy_logps - inputs["old_per_token_logps"]) > bound
        let_through = lifted & (advantages > 0) & (log_ratio.exp() > bound) & ~is_clipped
        parts |= {"acr/lifted_share": lifted, "acr/let_through_share": let_through}
    sums = torch.stack([part.sum().float() for part in (learned, *parts.values())])
    count, *totals = sum_over_processes(sums).tolist()
    return {name: total / max(count, 1.0) for name, total in zip(parts, totals, strict=True)}
