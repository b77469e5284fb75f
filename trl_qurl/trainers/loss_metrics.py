"""What happened to the tokens of one update: how far the policy has moved since the rollout, what ACR let through.

Sums come first and are reduced over processes by the caller. B sequences, T completion tokens.
"""

import torch


def loss_sums(
    policy_logps: torch.Tensor,
    proximal_logps: torch.Tensor,
    old_logps: torch.Tensor,
    lifted_epsilon_high: torch.Tensor,
    advantages: torch.Tensor,
    learned: torch.Tensor,
    epsilon_high: float,
) -> torch.Tensor:
    """
    Sums over the tokens learned from, to be added up over processes.

    Args:
        policy_logps: Log-probabilities under the policy being updated, nats, (B, T).
        proximal_logps: The same under the policy at rollout time, (B, T).
        old_logps: What the loss had below the ratio, (B, T).
        lifted_epsilon_high: Distance of the upper clip bound above 1, as the loss had it, (B, T).
        advantages: (B,) or (B, T).
        learned: Tokens learned from, bool (B, T).
        epsilon_high: Distance of the upper clip bound above 1 before it is lifted.

    Returns:
        Sums of (1, R − 1 − log R, [lifted], [let through]), shape (4,): tokens, the k3 estimator with
        R = π_θ/π_prox, tokens whose upper bound ACR lifted, and those of them that TIS would have clipped.
    """
    log_ratio = (policy_logps - proximal_logps).masked_fill(~learned, 0.0)  # (B, T)
    ratio = torch.exp(policy_logps - old_logps)  # (B, T)
    advantages = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)  # (B, T) or (B, 1)
    lifted = learned & (lifted_epsilon_high > epsilon_high)  # (B, T)
    let_through = lifted & (advantages > 0) & (ratio > 1 + epsilon_high) & (ratio <= 1 + lifted_epsilon_high)
    moved = (log_ratio.exp() - 1 - log_ratio).sum()
    return torch.stack([learned.sum(), moved, lifted.sum(), let_through.sum()]).float()


def loss_metrics(sums: torch.Tensor, lifts: bool) -> dict[str, float]:
    """
    Figures from reduced sums.

    `policy/approx_kl` estimates KL(π_prox ‖ π_θ), the staleness of the rollout, in nats per token; k3 of Schulman
    2020, "Approximating KL Divergence". `acr/*` are shares of tokens.

    Args:
        sums: Result of `loss_sums`, added up over processes, (4,).
        lifts: Whether the objective lifts the upper bound; the figures of ACR are left out if not.
    """
    count, moved, lifted, let_through = sums.tolist()
    count = max(count, 1.0)
    metrics = {"policy/approx_kl": moved / count}
    if lifts:
        metrics |= {"acr/lifted_share": lifted / count, "acr/let_through_share": let_through / count}
    return metrics
