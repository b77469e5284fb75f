"""The losses as their papers print them, which the objectives and
the trainers are tested against.
"""

import math

import torch

from trl_qurl.objective import get_objective, importance_ratio


def reference_loss(
    objective: str,
    policy_logps: torch.Tensor,
    proximal_logps: torch.Tensor,
    behavior_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    loss_type: str,
    epsilon_low: float,
    epsilon_high: float,
    cap: float | None,
    max_completion_length: int | None = None,
    num_items: float | None = None,
) -> torch.Tensor:
    """Loss of one micro-batch straight from the paper's equations.

        loss = − aggregate(J)

    Where J is `reference_objective`, and aggregate is TRL's for `loss_type`, without gradient
    accumulation. Source: TRL's `GRPOTrainer._compute_loss`.

    Args:
        objective: As those below, an argument of `reference_objective`.
        policy_logps: `(B, T)`.
        proximal_logps: `(B, T)`.
        behavior_logps: `(B, T)`.
        advantages: `(B,)`.
        mask: `(B, T)`, non-zero on completion tokens.
        loss_type: One of grpo, bnpo, dr_grpo or dapo.
        epsilon_low: Below 1.
        epsilon_high: Above 1.
        cap: C, a ratio.
        max_completion_length: Tokens; dr_grpo divides by it.
        num_items: Completion tokens of the whole batch; dapo divides by it.

    Returns:
        Scalar to minimize.
    """
    values = reference_objective(
        objective,
        policy_logps,
        proximal_logps,
        behavior_logps,
        advantages,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        cap=cap,
    )
    values = torch.where(mask.bool(), values, 0.0)
    if loss_type == "grpo":
        return -(values.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    divisors: dict[str, float | torch.Tensor | None] = {
        "bnpo": mask.sum(),
        "dr_grpo": max_completion_length and max_completion_length * values.size(0),
        "dapo": num_items,
    }
    divisor = divisors[loss_type]
    assert divisor is not None
    return -values.sum() / divisor


def reference_objective(
    objective: str,
    policy_logps: torch.Tensor,
    proximal_logps: torch.Tensor,
    behavior_logps: torch.Tensor,
    advantages: torch.Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
    cap: float | None,
) -> torch.Tensor:
    """J of each token, as the paper prints it: Eq. 1, 3, 4, 5 and 9.

    Args:
        objective: A name in `OBJECTIVES`.
        policy_logps: `(B, T)`, the only input that gets a gradient.
        proximal_logps: `(B, T)`.
        behavior_logps: `(B, T)`, may hold NaN, as for `surrogate_terms`.
        advantages: `(B,)`.
        epsilon_low: Distance of the lower clip bound below 1.
        epsilon_high: Distance of the upper clip bound above 1, before it is lifted.
        cap: C, a ratio, for acr and tis.

    Returns:
        `(B, T)`, to maximize.
    """
    name = get_objective(objective).name
    rho = importance_ratio(proximal_logps, behavior_logps)  # (B, T)
    R = (policy_logps - proximal_logps).exp()  # (B, T)
    A = advantages.unsqueeze(1)  # (B, 1)
    upper = torch.full_like(rho, 1 + epsilon_high)  # (B, T)

    def clipped(ratio: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
        return torch.minimum(ratio * A, ratio.clamp(min=1 - epsilon_low).minimum(upper) * A)

    if name == "naive":  # Eq. 1
        return clipped(R, upper)
    if name == "quantized_ratio":  # Eq. 3
        below = torch.where(behavior_logps.isnan(), proximal_logps, behavior_logps)
        return clipped((policy_logps - below).exp(), upper)
    if name == "decoupled":  # Eq. 4
        return rho * clipped(R, upper)
    assert cap is not None and 0 < cap < math.inf
    weight = rho.clamp(max=cap)  # (B, T), Eq. 5
    if name == "tis":
        return weight * clipped(R, upper)
    r = (cap / rho).clamp(max=1)  # (B, T), Eq. 6-7
    return weight * clipped(R, upper / r)  # Eq. 9
