"""Per-token importance ratios, and the mask of completions derived from them.

Pure functions of tensors and floats; `objective.py` builds the objectives from them.

Shapes: `B` sequences, `T` completion tokens. Equation numbers: QuRL, arXiv:2602.13953. Log-probabilities are in nats:
`behavior_logps` from the quantized policy that sampled the tokens, `proximal_logps` from the full-precision policy at
rollout time.
"""

import torch

LARGEST_LOG_RATIO = 20.0  # limits the weight of a single token, and keeps ρ² within float32


def importance_ratio(proximal_logps: torch.Tensor, behavior_logps: torch.Tensor) -> torch.Tensor:
    """Compute the ratio of the full-precision to the quantized policy at rollout time.

        ρ = π_prox / π_behav = exp(proximal_logps − behavior_logps)

    Source: the factor in front of Eq. 4.

    Args:
        proximal_logps: `(B, T)`.
        behavior_logps: `(B, T)`; NaN where the engine returned none.

    Returns:
        ρ, `(B, T)`, at most exp(`LARGEST_LOG_RATIO`); 1 where `behavior_logps` is NaN.

    Raises:
        ValueError: If the shapes differ or are not two-dimensional.
    """
    if proximal_logps.shape != behavior_logps.shape or proximal_logps.dim() != 2:
        raise ValueError(
            f"Got proximal_logps {tuple(proximal_logps.shape)}, behavior_logps {tuple(behavior_logps.shape)}: "
            "pad both to the same shape (B, T)."
        )
    log_ratio = (proximal_logps - behavior_logps).masked_fill(behavior_logps.isnan(), 0.0)
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


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
