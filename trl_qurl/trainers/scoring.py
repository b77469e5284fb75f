"""From log-probabilities (B, T) to the inputs of TRL's loss, and metrics of an update, for all
trainers of groups.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trl_qurl.objective import importance_ratio


@dataclass
class ScoringPass:
    """A trainer's forward passes inside a block, of which the first scores the policy."""

    # is given the log-probabilities, (B, T), and returns TRL's
    complete: Callable[[torch.Tensor], torch.Tensor]
    # whether the first scores a rollout: smoothing learns from it, if the model trains
    is_scoring: bool
    logps: torch.Tensor | None = None  # of the first, (B, T), without gradient
    seconds: float = 0.0


def learned_tokens(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mask the completion tokens that the model generated and learns from, bool (B, T): no padding
    or tool output.
    """
    return (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()


def cap_of(args: Any) -> float:
    """Return the cap C of a config, a ratio; infinite for `None`."""
    return math.inf if args.importance_cap is None else args.importance_cap


def loss_metrics(
    policy_logps: torch.Tensor,  # of the policy, (B, T)
    proximal_logps: torch.Tensor,  # of the policy at rollout time, (B, T)
    inputs: Mapping[str, torch.Tensor],  # of the loss
    sum_over_processes: Callable[[torch.Tensor], torch.Tensor],
    # with ACR: the cap C, and the bound 1 + ε_high that it lifts
    lifting: tuple[float, float] | None = None,
) -> dict[str, float]:
    """Return metrics of an update on B sequences of T completion tokens.

    `policy/approx_kl` estimates KL(π_prox ‖ π_θ) in nats per token by k3, R − 1 − log R with R =
    π_θ/π_prox (Schulman 2020, "Approximating KL Divergence"). `acr/*` are shares of all tokens
    learned from: those whose upper bound ACR lifted, and the subset of these that TIS would have
    clipped.
    """
    learned = learned_tokens(inputs)
    log_ratio = (policy_logps - proximal_logps).masked_fill(~learned, 0.0).double()  # (B, T)
    parts = {"policy/approx_kl": log_ratio.expm1() - log_ratio}  # (B, T) each
    if lifting is not None:
        cap, bound = lifting
        advantages = inputs["advantages"].reshape(len(learned), -1)  # (B, T) or (B, 1)
        # (B, T)
        lifted = learned & (
            importance_ratio(proximal_logps, inputs["sampling_per_token_logps"]) > cap
        )
        is_clipped = torch.exp(policy_logps - inputs["old_per_token_logps"]) > bound  # (B, T)
        let_through = lifted & (advantages > 0) & (log_ratio.exp() > bound) & ~is_clipped
        parts |= {"acr/lifted_share": lifted, "acr/let_through_share": let_through}
    sums = torch.stack([part.sum().float() for part in (learned, *parts.values())])
    count, *totals = sum_over_processes(sums).tolist()
    return {name: total / max(count, 1.0) for name, total in zip(parts, totals, strict=True)}
