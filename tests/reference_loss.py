"""The objectives as the paper prints them, which ours and the trainers' are tested against."""

import torch

from trl_qurl.objective import get_objective, importance_ratio


def reference_objective(
    objective,
    policy_logps,
    proximal_logps,
    behavior_logps,
    advantages,
    *,
    epsilon_low,
    epsilon_high,
    cap,
):
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

    def clipped(ratio, upper):
        return torch.minimum(ratio * A, ratio.clamp(min=1 - epsilon_low).minimum(upper) * A)

    if name == "naive":  # Eq. 1
        return clipped(R, upper)
    if name == "quantized_ratio":  # Eq. 3
        below = torch.where(behavior_logps.isnan(), proximal_logps, behavior_logps)
        return clipped((policy_logps - below).exp(), upper)
    if name == "decoupled":  # Eq. 4
        return rho * clipped(R, upper)
    weight = rho.clamp(max=cap)  # (B, T), Eq. 5
    if name == "tis":
        return weight * clipped(R, upper)
    r = (cap / rho).clamp(max=1)  # (B, T), Eq. 6-7
    return weight * clipped(R, upper / r)  # Eq. 9
