"""What happened to the tokens of one update: how far the policy has moved since the rollout, what ACR let through."""

from collections.abc import Callable, Mapping

import torch


def loss_metrics(
    policy_logps: torch.Tensor,  # of the policy being updated, (B, T)
    inputs: Mapping[str, torch.Tensor],  # of the loss
    learned: torch.Tensor,  # tokens learned from, bool (B, T)
    epsilon_high: float,  # the upper clip bound above 1, before ACR lifts it
    lifts: bool,  # whether the objective lifts it
    sum_over_processes: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, float]:
    """Metrics of an update of B sequences of T completion tokens; `acr/*` only if the objective lifts the bound.

    `policy/approx_kl` estimates KL(π_prox ‖ π_θ) in nats per token by k3, R − 1 − log R with R = π_θ/π_prox (Schulman
    2020, "Approximating KL Divergence"). `acr/*` are shares of tokens: those whose upper bound ACR lifted, and, among
    these, those that TIS would have clipped.
    """
    log_ratio = (policy_logps - inputs["proximal_logps"]).masked_fill(~learned, 0.0)  # (B, T)
    ratio = torch.exp(policy_logps - inputs["old_per_token_logps"])  # (B, T)
    advantages = inputs["advantages"]
    advantages = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)  # (B, T) or (B, 1)
    lifted = learned & (inputs["epsilon_high"] > epsilon_high)  # (B, T)
    let_through = lifted & (advantages > 0) & (ratio > 1 + epsilon_high) & (ratio <= 1 + inputs["epsilon_high"])
    moved = log_ratio.exp() - 1 - log_ratio  # (B, T)
    sums = torch.stack([part.sum().float() for part in (learned, moved, lifted, let_through)])
    count, *totals = sum_over_processes(sums).tolist()
    shares = [total / max(count, 1.0) for total in totals]
    names = ("policy/approx_kl", "acr/lifted_share", "acr/let_through_share") if lifts else ("policy/approx_kl",)
    return dict(zip(names, shares, strict=False))
