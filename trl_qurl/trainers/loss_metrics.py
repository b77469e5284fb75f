"""What happened to the tokens of one update: how far the policy has moved since the rollout, what ACR let through.

Sums come first and are reduced over processes by the caller. B sequences, T completion tokens.
"""

import torch


def loss_sums(
    policy_logps: torch.Tensor,  # of the policy being updated, (B, T)
    proximal_logps: torch.Tensor,  # of the policy at rollout time, (B, T)
    old_logps: torch.Tensor,  # what the loss had below the ratio, (B, T)
    lifted_epsilon_high: torch.Tensor,  # the upper clip bound above 1 as the loss had it, (B, T)
    advantages: torch.Tensor,  # (B,) or (B, T)
    learned: torch.Tensor,  # tokens learned from, bool (B, T)
    epsilon_high: float,  # the upper clip bound above 1 before it is lifted
) -> torch.Tensor:
    """Sums of (1, R − 1 − log R, [lifted], [let through]) over the tokens learned from, (4,), with R = π_θ/π_prox.

    Lifted are tokens whose upper bound ACR lifted; let through are those of them that TIS would have clipped.
    """
    log_ratio = (policy_logps - proximal_logps).masked_fill(~learned, 0.0)  # (B, T)
    ratio = torch.exp(policy_logps - old_logps)  # (B, T)
    advantages = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)  # (B, T) or (B, 1)
    lifted = learned & (lifted_epsilon_high > epsilon_high)  # (B, T)
    let_through = lifted & (advantages > 0) & (ratio > 1 + epsilon_high) & (ratio <= 1 + lifted_epsilon_high)
    moved = (log_ratio.exp() - 1 - log_ratio).sum()
    return torch.stack([learned.sum(), moved, lifted.sum(), let_through.sum()]).float()


def loss_metrics(sums: torch.Tensor, lifts: bool) -> dict[str, float]:
    """Metrics from the sums of `loss_sums` over all processes; those of ACR if the objective `lifts` the bound.

    `policy/approx_kl` estimates KL(π_prox ‖ π_θ) in nats per token by k3 (Schulman 2020, "Approximating KL
    Divergence"). `acr/*` are shares of tokens.
    """
    count, moved, lifted, let_through = sums.tolist()
    count = max(count, 1.0)
    metrics = {"policy/approx_kl": moved / count}
    if lifts:
        metrics |= {"acr/lifted_share": lifted / count, "acr/let_through_share": let_through / count}
    return metrics
