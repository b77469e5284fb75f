"""Per-token importance ratios.

A pure function of tensors; `objective.py` builds the objectives from it.

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
