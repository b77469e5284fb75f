"""The importance ratio, the objectives by name, and inputs that make TRL's loss compute them.

Pure functions of tensors and floats. TRL computes the clipped surrogate; `surrogate_terms` returns
the inputs that turn it into the requested objective. `tests/reference_loss.py` has the equations as
printed in the papers.

Shapes: `B` sequences, `T` completion tokens. Equation numbers: QuRL, arXiv:2602.13953.
Log-probabilities are in nats: `behavior_logps` from the actor, the quantized copy that sampled,
`proximal_logps` from the policy at rollout time, `policy_logps` from the policy being updated.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

LARGEST_LOG_RATIO = 20.0  # limits the weight of a single token, and keeps ρ² within float32

Correction = Literal["none", "full", "truncated"]
"""Token weight: 1, ρ, or min(ρ, C)."""


@dataclass(frozen=True)
class Objective:
    """An objective of the paper, of related work, or added by `register_objective`."""

    name: str  # what users write (`objective="acr"`)
    source: str  # where it is defined, such as `"Eq. 9 of QuRL"`
    denominator: Literal["proximal", "behavior"] = "proximal"  # denominator of the clipped ratio
    correction: Correction = "none"  # token weight; see `Correction`
    # Whether to multiply the upper clip bound by ρ / C where ρ > C ("truncated" only).
    lifts_upper_bound: bool = False

    def __post_init__(self) -> None:
        if self.lifts_upper_bound and self.correction != "truncated":
            raise ValueError(
                f"Objective {self.name!r} has lifts_upper_bound=True with "
                f"correction={self.correction!r}, which has no cap: set correction='truncated', or "
                "leave lifts_upper_bound out."
            )


TRL_LOSS = "trl"  # TRL's own loss and correction, not an `Objective`

PAPER = (
    Objective("acr", "Eq. 9 of QuRL", correction="truncated", lifts_upper_bound=True),
    Objective("tis", "Eq. 5 of QuRL", correction="truncated"),
    Objective("decoupled", "Eq. 4 of QuRL", correction="full"),
    Objective("quantized_ratio", "Eq. 3 of QuRL", denominator="behavior"),
    Objective("naive", "Eq. 1 of QuRL"),
)
OBJECTIVES: dict[str, Objective] = {objective.name: objective for objective in PAPER}
"""All objectives by name, including those added by `register_objective`."""


def register_objective(objective: Objective) -> None:
    """Make an objective available by name to configs, trainers and model cards.

    Args:
        objective: An objective with a new name.

    Raises:
        ValueError: If the name is taken.
    """
    if objective.name in (*OBJECTIVES, TRL_LOSS):
        raise ValueError(
            f"An objective named {objective.name!r} is already registered: choose another name."
        )
    OBJECTIVES[objective.name] = objective


def importance_ratio(proximal_logps: torch.Tensor, behavior_logps: torch.Tensor) -> torch.Tensor:
    """Compute the ratio of the policy at rollout time to the actor, per token.

        ρ = π_prox / π_behav = exp(proximal_logps − behavior_logps)

    Source: the factor in front of Eq. 4.

    Args:
        proximal_logps: `(B, T)`.
        behavior_logps: `(B, T)`; NaN where the engine returned none.

    Returns:
        ρ, `(B, T)`, at most exp(`LARGEST_LOG_RATIO`); 1 where `behavior_logps` is NaN.
    """
    log_ratio = (proximal_logps - behavior_logps).masked_fill(behavior_logps.isnan(), 0.0)
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


class SurrogateTerms(NamedTuple):
    """Inputs that turn the clipped surrogate into one of `OBJECTIVES`, detached.

    See `surrogate_terms`.
    """

    old_logps: torch.Tensor  # `(B, T)`, in nats; the denominator of the clipped ratio
    weight: torch.Tensor  # `(B, T)`, factor on each token's surrogate


def get_objective(name: str) -> Objective:
    """Look up an objective by name.

    Args:
        name: A name in `OBJECTIVES`.

    Returns:
        The objective.

    Raises:
        ValueError: If the objective is unknown; the message lists the valid names.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"Unknown objective {name!r}. Choose one of: {', '.join(OBJECTIVES)}.")
    return OBJECTIVES[name]


def surrogate_terms(
    objective: str,
    proximal_logps: torch.Tensor,
    behavior_logps: torch.Tensor,
    advantages: torch.Tensor,
    *,
    cap: float | None,
) -> SurrogateTerms:
    """Compute the inputs that turn the plain clipped surrogate into an objective.

        weight · min(R·A, clip(R, 1 − ε_low, 1 + ε_high)·A),    R = exp(policy_logps − old_logps)

    Where old_logps and weight are the results, and ε_low and ε_high TRL's. Source: see
    `Objective.source`.

    ACR divides the upper bound by r = C/ρ where ρ > C (Eq. 6-9). As C · min(R, (1 + ε)/r) = ρ ·
    min(r·R, 1 + ε), the weight there is ρ and old_logps are those of π_prox/r. With A <= 0 no upper
    bound acts.

    Args:
        objective: A name in `OBJECTIVES`.
        proximal_logps: `(B, T)`.
        behavior_logps: `(B, T)`, may contain NaN: there ρ is 1, and π_prox replaces π_behav in the
            denominator.
        advantages: A, `(B,)` or `(B, T)`.
        cap: C, the largest weight of acr and tis, a ratio above 0; `None` for no cap. The others
            ignore it.

    Returns:
        Two tensors `(B, T)`, detached: no gradient flows through sampling.

    Raises:
        ValueError: If the objective is unknown.
    """
    preset = get_objective(objective)
    proximal_logps = proximal_logps.detach()
    behavior_logps = behavior_logps.detach()
    rho = importance_ratio(proximal_logps, behavior_logps)  # (B, T)

    old_logps = proximal_logps
    if preset.denominator == "behavior":
        old_logps = torch.where(behavior_logps.isnan(), proximal_logps, behavior_logps)  # (B, T)

    weight = torch.ones_like(rho)
    if preset.correction == "full":
        weight = rho
    elif preset.correction == "truncated":
        if cap is None:
            cap = math.inf
        weight = rho.clamp(max=cap)  # (B, T)
        if preset.lifts_upper_bound:
            lifted = (rho > cap) & (advantages.reshape(len(rho), -1) > 0)  # (B, T)
            old_logps = torch.where(lifted, old_logps + rho.log() - math.log(cap), old_logps)
            weight = torch.where(lifted, rho, weight)
    return SurrogateTerms(old_logps, weight)
