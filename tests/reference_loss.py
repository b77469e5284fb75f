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

    Where J is the per-token objective and aggregate is TRL's for `loss_type`, without gradient
    accumulation.

    Source: Eq. 1, 3, 4, 5 and 9; for the aggregations, TRL's `GRPOTrainer._compute_loss`.

    Args:
        objective: A name in `OBJECTIVES`.
        policy_logps: `(B, T)`, the only input that gets a gradient.
        proximal_logps: `(B, T)`.
        behavior_logps: `(B, T)`, may hold NaN, as for `surrogate_terms`.
        advantages: `(B,)` or `(B, T)`.
        mask: `(B, T)`, non-zero on completion tokens.
        loss_type: One of grpo, bnpo, dr_grpo or dapo.
        epsilon_low: Distance of the lower clip bound below 1.
        epsilon_high: Distance of the upper clip bound above 1, before it is lifted.
        cap: C, a ratio, for acr and tis.
        max_completion_length: Tokens; dr_grpo divides by it.
        num_items: Completion tokens of the whole batch; dapo divides by it.

    Returns:
        Scalar to minimize.
    """
    name = get_objective(objective).name
    prox, behav = proximal_logps.detach(), behavior_logps.detach()
    rho = importance_ratio(prox, behav)  # (B, T)
    R = (policy_logps - prox).exp()  # (B, T)
    A = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages  # (B, 1) or (B, T)
    upper = torch.full_like(rho, 1 + epsilon_high)  # (B, T)

    def clipped(ratio: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
        return torch.minimum(ratio * A, ratio.clamp(min=1 - epsilon_low).minimum(upper) * A)

    if name == "naive":  # Eq. 1
        J = clipped(R, upper)
    elif name == "quantized_ratio":  # Eq. 3
        R_hat = (policy_logps - torch.where(behav.isnan(), prox, behav)).exp()
        J = clipped(R_hat, upper)
    elif name == "decoupled":  # Eq. 4
        J = rho * clipped(R, upper)
    else:
        assert cap is not None and 0 < cap < math.inf
        weight = rho.clamp(max=cap)  # (B, T), Eq. 5
        r = (cap / rho).clamp(max=1)  # (B, T), Eq. 6-7
        J = weight * clipped(R, upper if name == "tis" else upper / r)  # Eq. 5, Eq. 9
    return -_aggregate(J, mask.bool(), loss_type, max_completion_length, num_items)


def _aggregate(
    values: torch.Tensor,
    mask: torch.Tensor,
    loss_type: str,
    max_completion_length: int | None,
    num_items: float | None,
) -> torch.Tensor:
    values = torch.where(mask, values, 0.0)  # (B, T)
    if loss_type == "grpo":
        return (values.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    divisors: dict[str, float | torch.Tensor | None] = {
        "bnpo": mask.sum().clamp(min=1),
        "dr_grpo": max_completion_length and max_completion_length * values.size(0),
        "dapo": None if num_items is None else max(float(num_items), 1.0),
    }
    divisor = divisors.get(loss_type)
    assert divisor is not None, f"cannot average for {loss_type}"
    return values.sum() / divisor
