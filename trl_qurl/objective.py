"""The objectives by name, and what a trainer hands to TRL's own loss to compute one.

Pure functions of tensors and floats. TRL computes the clipped surrogate, and `surrogate_terms` chooses its inputs so
that it is the objective asked for, with weights and bounds from `importance.py`. `tests/reference_loss.py` has the
equations as the papers print them.

Shapes: `B` sequences, `T` completion tokens. Equation numbers: QuRL, arXiv:2602.13953. Log-probabilities, in nats:
`behavior_logps` of the quantized policy that sampled the tokens, `proximal_logps` of the full-precision policy at that
moment, `policy_logps` of the full-precision policy being updated.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from trl_qurl.importance import (
    ClipRange,
    adaptive_clip_range,
    checked_cap,
    geometric_mask,
    importance_ratio,
)

Correction = Literal["none", "full", "truncated", "masked", "masked_sequence"]
"""The weight: 1, ρ, min(ρ, C), ρ from floor to C and 0 elsewhere, or `geometric_mask`'s."""


@dataclass(frozen=True)
class Objective:
    """One row of the paper's comparison, one that others use, or one that `register_objective` adds to them."""

    name: str  # what users write (`objective="acr"`)
    source: str  # where it is stated, such as `"Eq. 9 of QuRL"`
    description: str  # what it does, for model cards; the end of a sentence
    denominator: Literal["proximal", "behavior"] = "proximal"  # the policy below the clipped ratio
    correction: Correction = "none"  # the weight on a token, by `Correction`
    lifts_upper_bound: bool = False  # whether the upper clip bound is divided by the kept share r ("truncated" only)

    def __post_init__(self) -> None:
        if self.lifts_upper_bound and self.correction != "truncated":
            raise ValueError(
                f"Objective {self.name!r} has lifts_upper_bound=True with correction={self.correction!r}: without a "
                "cap nothing is cut, so set correction='truncated', or leave lifts_upper_bound out."
            )


TRL_LOSS = "trl"  # TRL's own loss and correction, which no `Objective` describes

OBJECTIVES: dict[str, Objective] = {}
"""The objectives by name, with those that were added since."""


def register_objective(objective: Objective) -> None:
    """Make an objective known under its name, to configs, trainers and model cards.

    Args:
        objective: An objective with a new name.

    Raises:
        ValueError: There is one of that name already.
    """
    if objective.name in (*OBJECTIVES, TRL_LOSS):
        raise ValueError(f"There is an objective {objective.name!r} already: give this one another name.")
    OBJECTIVES[objective.name] = objective


for _objective in (
    Objective(
        "acr",
        "Eq. 9 of QuRL",
        "the ratio to the full-precision policy, clipped; each token weighted by the truncated importance ratio, "
        "which lifts the upper clip bound where it is cut (adaptive clipping range)",
        correction="truncated",
        lifts_upper_bound=True,
    ),
    Objective(
        "tis",
        "Eq. 5 of QuRL",
        "the ratio to the full-precision policy, clipped; each token weighted by the truncated importance ratio",
        correction="truncated",
    ),
    Objective(
        "decoupled",
        "Eq. 4 of QuRL",
        "the ratio to the full-precision policy, clipped; each token weighted by the whole importance ratio",
        correction="full",
    ),
    Objective("quantized_ratio", "Eq. 3 of QuRL", "the ratio to the quantized policy, clipped", "behavior"),
    Objective(
        "naive",
        "Eq. 1 of QuRL",
        "the ratio to the full-precision policy, clipped; the difference to the quantized one is not corrected",
    ),
    Objective(
        "icepop",
        "IcePop, arXiv 2510.18855",
        "the ratio to the full-precision policy, clipped; each token weighted by the importance ratio, or left out "
        "where that is outside of a range",
        correction="masked",
    ),
    Objective(
        "geometric_mask",
        "the geometric mask of Liu et al. 2025, richardli.xyz/rl-collapse",
        "the ratio to the full-precision policy, clipped; completions are left out whose mean importance ratio per "
        "token is outside of a range",
        correction="masked_sequence",
    ),
):
    register_objective(_objective)


class SurrogateTerms(NamedTuple):
    """What turns the clipped surrogate into one of `OBJECTIVES`; see `surrogate_terms`. All are detached."""

    old_logps: torch.Tensor  # `(B, T)`, log-probabilities below the clipped ratio, in nats
    weight: torch.Tensor  # `(B, T)`, factor on each token's surrogate
    epsilon_low: torch.Tensor  # `(B, T)`, distance of the lower clip bound below 1
    epsilon_high: torch.Tensor  # `(B, T)`, distance of the upper clip bound above 1


def get_objective(name: str) -> Objective:
    """Look an objective up by name.

    Args:
        name: A name in `OBJECTIVES`.

    Returns:
        The objective.

    Raises:
        ValueError: There is none of that name; the message lists those there are.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"There is no objective {name!r}. Choose one of: {', '.join(OBJECTIVES)}.")
    return OBJECTIVES[name]


def surrogate_terms(
    objective: str,
    proximal_logps: torch.Tensor,
    behavior_logps: torch.Tensor,
    *,
    cap: float | None,
    floor: float | None = None,
    epsilon_low: float,
    epsilon_high: float,
) -> SurrogateTerms:
    """Inputs with which the plain clipped surrogate computes an objective.

        weight · min(R·A, clip(R, 1 − ε_low, 1 + ε_high)·A),    R = exp(policy_logps − old_logps)

    Where old_logps, weight, ε_low and ε_high are returned. Source: as `OBJECTIVES` says.

    Args:
        objective: A name in `OBJECTIVES`.
        proximal_logps: `(B, T)`.
        behavior_logps: `(B, T)`, may hold NaN: ρ = 1 there, with π_prox instead of π_behav below the ratio.
        cap: C, a ratio: the largest weight, or the largest ratio that a mask keeps. Finite and above 0 for all but
            decoupled, quantized_ratio and naive, which do not read it.
        floor: The smallest weight of acr and tis, a ratio; None for none (the paper has none).
            For icepop and geometric_mask the smallest ratio that is kept; None for 1 / C.
        epsilon_low: Distance of the lower clip bound below 1.
        epsilon_high: Distance of the upper clip bound above 1.

    Returns:
        Four tensors `(B, T)`, detached: no gradient flows through sampling.

    Raises:
        ValueError: Unknown objective, shapes that differ, or a cap or floor out of range.
    """
    preset = get_objective(objective)
    proximal_logps, behavior_logps = proximal_logps.detach(), behavior_logps.detach()
    rho = importance_ratio(proximal_logps, behavior_logps)  # (B, T)

    old_logps = proximal_logps
    if preset.denominator == "behavior":
        old_logps = torch.where(behavior_logps.isnan(), proximal_logps, behavior_logps)  # (B, T)

    weight = torch.ones_like(rho)
    if preset.correction == "full":
        weight = rho
    elif preset.correction == "truncated":
        weight = rho.clamp(min=floor, max=checked_cap(cap, floor))  # (B, T)
    elif preset.correction.startswith("masked"):
        cap = checked_cap(cap, floor)
        floor = min(cap, 1 / cap) if floor is None else floor
        weight = torch.where((rho >= floor) & (rho <= cap), rho, 0.0)  # (B, T)
        if preset.correction == "masked_sequence":
            weight = geometric_mask(proximal_logps, behavior_logps, floor, cap).expand_as(rho)

    clip_range = ClipRange(torch.full_like(rho, epsilon_low), torch.full_like(rho, epsilon_high))
    if preset.lifts_upper_bound:
        clip_range = adaptive_clip_range(rho, checked_cap(cap), epsilon_low, epsilon_high)
    return SurrogateTerms(old_logps, weight, *clip_range)
