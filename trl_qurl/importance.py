"""The importance ratio of each token, and what is made of it: a clip range, a mask.

Pure functions of tensors and floats, of which `objective.py` builds the objectives.

Shapes: `B` sequences, `T` completion tokens. Equation numbers: QuRL, arXiv:2602.13953. Log-probabilities, in nats:
`behavior_logps` of the quantized policy that sampled the tokens, `proximal_logps` of the full-precision policy at that
moment.
"""

import math
from typing import NamedTuple

import torch


class ClipRange(NamedTuple):
    """Clip bounds in TRL's convention: the ratio is clamped to [1 − epsilon_low, 1 + epsilon_high]."""

    epsilon_low: torch.Tensor  # `(B, T)`, distance of the lower bound below 1
    epsilon_high: torch.Tensor  # `(B, T)`, distance of the upper bound above 1


def importance_ratio(proximal_logps: torch.Tensor, behavior_logps: torch.Tensor) -> torch.Tensor:
    """Ratio of the full-precision to the quantized policy at the moment of the rollout.

        ρ = π_prox / π_behav = exp(proximal_logps − behavior_logps)

    Source: the factor in front of Eq. 4.

    Args:
        proximal_logps: `(B, T)`.
        behavior_logps: `(B, T)`; NaN where the engine returned none.

    Returns:
        ρ, `(B, T)`; 1 where there is nothing to correct by (NaN).

    Raises:
        ValueError: The shapes differ or are not two-dimensional.
    """
    if proximal_logps.shape != behavior_logps.shape or proximal_logps.dim() != 2:
        raise ValueError(
            f"Got proximal_logps {tuple(proximal_logps.shape)}, behavior_logps {tuple(behavior_logps.shape)}: "
            "pad both to one shape (B, T)."
        )
    return (proximal_logps - behavior_logps).masked_fill(behavior_logps.isnan(), 0.0).exp()


def kept_share(rho: torch.Tensor, cap: float) -> torch.Tensor:
    """Share of the behavior ratio that a cap on ρ keeps.

        r = min(1, C / ρ) = π_behav / max(π_behav, π_prox / C)

    Capping ρ at C is lifting π_behav to π_prox / C. Source: Eq. 6-7.

    Args:
        rho: ρ, `(B, T)`.
        cap: C, a ratio, finite and above 0.

    Returns:
        r in [0, 1], `(B, T)`, exactly 1 where ρ ≤ C.

    Raises:
        ValueError: `cap` is out of range.
    """
    checked_cap(cap)
    # `where`, not `clamp`: C / ρ rounds, and must not come out just below 1 where nothing was cut.
    return torch.where(rho > cap, cap / rho, 1.0)


def adaptive_clip_range(rho: torch.Tensor, cap: float, epsilon_low: float, epsilon_high: float) -> ClipRange:
    """Clip range whose upper bound rises where the cap cuts ρ, and whose lower bound never moves.

        1 − ε_low' = 1 − ε_low,    1 + ε_high' = (1 + ε_high) / r

    Where r is `kept_share(rho, cap)`. Source: Eq. 9, with DAPO's ε_low and ε_high in the place of its single ε.

    Args:
        rho: ρ, `(B, T)`.
        cap: C, a ratio, finite and above 0.
        epsilon_low: Distance of the lower bound below 1.
        epsilon_high: Distance of the upper bound above 1, before it is lifted.

    Returns:
        Both distances, each `(B, T)`; exactly `epsilon_low` and `epsilon_high` where ρ ≤ C.

    Raises:
        ValueError: `cap` is out of range.
    """
    lifted = (1.0 + epsilon_high) / kept_share(rho, cap) - 1.0  # (B, T)
    # (1 + ε) − 1 is not ε in floating point, so a bound that is not lifted does not come from the formula.
    return ClipRange(torch.full_like(rho, epsilon_low), torch.where(rho > cap, lifted, epsilon_high))


def geometric_mask(
    proximal_logps: torch.Tensor, behavior_logps: torch.Tensor, floor: float, cap: float
) -> torch.Tensor:
    """1 for completions on which the two policies agree on average, and 0 for all others.

        M = 1 if floor ≤ (∏ ρ_t)^(1/n) ≤ cap, else 0

    With the geometric mean of ρ over the n tokens that the engine scored; unlike their product it does not grow with
    the length. Source: Liu et al. 2025, "When Speed Kills Stability", part 3 (richardli.xyz/rl-collapse-3).

    Args:
        proximal_logps: `(B, T)`.
        behavior_logps: `(B, T)`; NaN where a token is not learned from, or the engine returned nothing.
        floor: Smallest mean ratio that is kept.
        cap: Largest mean ratio that is kept.

    Returns:
        The weights, `(B, 1)`; 1 where no token was scored.
    """
    scored = ~behavior_logps.isnan()
    log_ratio = torch.where(scored, proximal_logps - behavior_logps, 0.0).sum(-1, keepdim=True)  # (B, 1)
    mean = (log_ratio / scored.sum(-1, keepdim=True).clamp(min=1)).exp()
    return ((mean >= floor) & (mean <= cap)).to(proximal_logps.dtype)


def checked_cap(cap: float | None, floor: float | None = None) -> float:
    """The cap C of a ratio, if it can limit one.

    Args:
        cap: C, a ratio.
        floor: The smallest ratio, None for none.

    Returns:
        `cap`.

    Raises:
        ValueError: `cap` is not finite and above 0, or `floor` is not in [0, cap].
    """
    if cap is None or not 0 < cap < math.inf:
        raise ValueError(f"Got cap={cap}: give a cap finite and above 0 (2 is usual), or use objective 'decoupled'.")
    if floor is not None and not 0 <= floor <= cap:
        raise ValueError(f"Got floor={floor} with cap={cap}. The floor must lie in [0, cap]; None means no floor.")
    return cap
