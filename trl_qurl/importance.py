"""Per-token importance ratios, and the clip range and mask derived from them.

Pure functions of tensors and floats; `objective.py` builds the objectives from them.

Shapes: `B` sequences, `T` completion tokens. Equation numbers: QuRL, arXiv:2602.13953. Log-probabilities are in nats:
`behavior_logps` from the quantized policy that sampled the tokens, `proximal_logps` from the full-precision policy at
rollout time.
"""

import math

import torch


def importance_ratio(proximal_logps: torch.Tensor, behavior_logps: torch.Tensor) -> torch.Tensor:
    """Compute the ratio of the full-precision to the quantized policy at rollout time.

        ρ = π_prox / π_behav = exp(proximal_logps − behavior_logps)

    Source: the factor in front of Eq. 4.

    Args:
        proximal_logps: `(B, T)`.
        behavior_logps: `(B, T)`; NaN where the engine returned none.

    Returns:
        ρ, `(B, T)`; 1 where `behavior_logps` is NaN.

    Raises:
        ValueError: If the shapes differ or are not two-dimensional.
    """
    if proximal_logps.shape != behavior_logps.shape or proximal_logps.dim() != 2:
        raise ValueError(
            f"Got proximal_logps {tuple(proximal_logps.shape)}, behavior_logps {tuple(behavior_logps.shape)}: "
            "pad both to the same shape (B, T)."
        )
    return (proximal_logps - behavior_logps).masked_fill(behavior_logps.isnan(), 0.0).exp()


def kept_share(rho: torch.Tensor, cap: float) -> torch.Tensor:
    """Compute the share of ρ that remains when it is capped at C.

        r = min(1, C / ρ) = π_behav / max(π_behav, π_prox / C)

    Capping ρ at C is equivalent to lifting π_behav to π_prox / C. Source: Eq. 6-7.

    Args:
        rho: ρ, `(B, T)`.
        cap: C, a ratio, finite and above 0.

    Returns:
        r in [0, 1], `(B, T)`, exactly 1 where ρ ≤ C.

    Raises:
        ValueError: If `cap` is out of range.
    """
    if not 0 < cap < math.inf:
        raise ValueError(f"Got cap={cap}: give a cap finite and above 0 (2 is usual).")
    # `where` instead of `clamp`: C / ρ rounds, and must not end up just below 1 where ρ was not capped.
    return torch.where(rho > cap, cap / rho, 1.0)


def adaptive_clip_range(rho: torch.Tensor, cap: float, epsilon_high: float) -> torch.Tensor:
    """Lift the upper clip bound where ρ exceeds the cap; the lower bound never moves.

        1 + ε_high' = (1 + ε_high) / r

    Where r is `kept_share(rho, cap)`. Source: Eq. 9, with DAPO's ε_high instead of its single ε.

    Args:
        rho: ρ, `(B, T)`.
        cap: C, a ratio, finite and above 0; checked by `kept_share`.
        epsilon_high: Distance of the upper bound above 1, before it is lifted.

    Returns:
        ε_high', `(B, T)`; exactly `epsilon_high` where ρ ≤ C.
    """
    lifted_epsilon = (1.0 + epsilon_high) / kept_share(rho, cap) - 1.0  # (B, T)
    # (1 + ε) − 1 is not ε in floating point, so bounds that are not lifted bypass the formula.
    return torch.where(rho > cap, lifted_epsilon, epsilon_high)


def geometric_mask(
    proximal_logps: torch.Tensor, behavior_logps: torch.Tensor, floor: float, cap: float
) -> torch.Tensor:
    """Return 1 for completions on which the two policies agree on average, and 0 for all others.

        M = 1 if floor ≤ (∏ ρ_t)^(1/n) ≤ cap, else 0

    The geometric mean is over the n tokens that the engine scored. Unlike the product, it does not grow with the
    length. Source: Liu et al. 2025, "When Speed Kills Stability", part 3 (richardli.xyz/rl-collapse-3).

    Args:
        proximal_logps: `(B, T)`.
        behavior_logps: `(B, T)`; NaN on tokens that are not learned or that the engine did not score.
        floor: Smallest mean ratio to keep.
        cap: Largest mean ratio to keep.

    Returns:
        The weights, `(B, 1)`; 1 where no token was scored.
    """
    scored = ~behavior_logps.isnan()
    log_ratio = torch.where(scored, proximal_logps - behavior_logps, 0.0).sum(-1, keepdim=True)  # (B, 1)
    mean = (log_ratio / scored.sum(-1, keepdim=True).clamp(min=1)).exp()
    return ((mean >= floor) & (mean <= cap)).to(proximal_logps.dtype)
