"""Token metrics of one update: how far the policy has moved since the rollout, and what ACR let through."""

from collections.abc import Callable, Mapping

import torch


def loss_metrics(
    policy_logps: torch.Tensor,  # of the policy being updated, (B, T)
    proximal_logps: torch.Tensor,  # of the policy at rollout time, (B, T)
    inputs: Mapping[str, torch.Tensor],  # of the loss
    learned: torch.Tensor,  # mask of the tokens learned from, bool (B, T)
    epsilon_high: float,  # the upper clip bound above 1, before ACR lifts it
    sum_over_processes: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, float]:
    """Return metrics of an update on B sequences of T completion tokens; `acr/*` only if `inputs` has lifted bounds.

    `policy/approx_kl` estimates KL(π_prox ‖ π_θ) in nats per token by k3, R − 1 − log R with R = π_θ/π_prox (Schulman
    2020, "Approximating KL Divergence"). `acr/*` are shares of all tokens learned from: those whose upper bound ACR
    lifted, and the subset of these that TIS would have clipped.
    """
    log_ratio = (policy_logps - proximal_logps).masked_fill(~learned, 0.0).double()  # (B, T)
    parts = {"policy/approx_kl": log_ratio.expm1() - log_ratio}  # (B, T) each
    if "epsilon_high" in inputs:
        ratio = torch.exp(policy_logps - inputs["old_per_token_logps"])  # (B, T)
        advantages = inputs["advantages"]
        advantages = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)  # (B, T) or (B, 1)
        lifted = learned & (inputs["epsilon_high"] > epsilon_high)  # (B, T)
        let_through = lifted & (advantages > 0) & (ratio > 1 + epsilon_high) & (ratio <= 1 + inputs["epsilon_high"])
        parts |= {"acr/lifted_share": lifted, "acr/let_through_share": let_through}
    sums = torch.stack([part.sum().float() for part in (learned, *parts.values())])
    count, *totals = sum_over_processes(sums).tolist()
    return {name: total / max(count, 1.0) for name, total in zip(parts, totals, strict=True)}
