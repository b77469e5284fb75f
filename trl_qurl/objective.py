"""The objectives: importance ratio, adaptive clip range, and what a trainer hands to TRL's own loss.

Pure functions of tensors and floats; nothing here knows a trainer, a config or a process group. The clipped surrogate
itself is not here: TRL computes it, and `surrogate_terms` chooses its inputs so that it computes the objective asked
for. `reference_loss` is the same thing once more, straight from the paper, to test that against.

Shapes: `B` sequences, `T` completion tokens. Equation numbers: QuRL, arXiv:2602.13953. Log-probabilities, in nats:
`behavior_logps` of the quantized policy that sampled the tokens, `proximal_logps` of the full-precision policy at that
moment, `policy_logps` of the full-precision policy being updated.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch


@dataclass(frozen=True)
class Objective:
    """
    One row of the paper's comparison.

    Attributes:
        name: What users write (`objective="acr"`).
        equation: Where the paper states it.
        denominator: The policy below the clipped ratio.
        correction: The surrogate's factor: 1 (none), ρ (full) or min(ρ, C) (truncated).
        lifts_upper_bound: Whether the upper clip bound is divided by the kept share r.
    """

    name: str
    equation: str
    denominator: Literal["proximal", "behavior"]
    correction: Literal["none", "full", "truncated"]
    lifts_upper_bound: bool


_PRESETS = (
    Objective("acr", "Eq. 9", "proximal", "truncated", lifts_upper_bound=True),
    Objective("tis", "Eq. 5", "proximal", "truncated", lifts_upper_bound=False),
    Objective("decoupled", "Eq. 4", "proximal", "full", lifts_upper_bound=False),
    Objective("quantized_ratio", "Eq. 3", "behavior", "none", lifts_upper_bound=False),
    Objective("naive", "Eq. 1", "proximal", "none", lifts_upper_bound=False),
)
OBJECTIVES = {objective.name: objective for objective in _PRESETS}
"""The objectives by name: `acr`, `tis`, `decoupled`, `quantized_ratio`, `naive`."""


class ClipRange(NamedTuple):
    """
    Clip bounds in TRL's convention: the ratio is clamped to [1 − epsilon_low, 1 + epsilon_high].

    Attributes:
        epsilon_low: `(B, T)`, distance of the lower bound below 1.
        epsilon_high: `(B, T)`, distance of the upper bound above 1.
    """

    epsilon_low: torch.Tensor
    epsilon_high: torch.Tensor


class SurrogateTerms(NamedTuple):
    """
    What turns the clipped surrogate into one of `OBJECTIVES`; see `surrogate_terms`. All are detached.

    Attributes:
        old_logps: `(B, T)`, log-probabilities below the clipped ratio, in nats.
        weight: `(B, T)`, factor on each token's surrogate.
        epsilon_low: `(B, T)`, distance of the lower clip bound below 1.
        epsilon_high: `(B, T)`, distance of the upper clip bound above 1.
    """

    old_logps: torch.Tensor
    weight: torch.Tensor
    epsilon_low: torch.Tensor
    epsilon_high: torch.Tensor


def get_objective(name: str) -> Objective:
    """Look an objective up by name.

    Args:
        name: a name in `OBJECTIVES`.

    Returns:
        The objective.

    Raises:
        ValueError: there is none of that name; the message lists those there are.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"There is no objective {name!r}. Choose one of: {', '.join(OBJECTIVES)}.")
    return OBJECTIVES[name]


def importance_ratio(proximal_logps: torch.Tensor, behavior_logps: torch.Tensor) -> torch.Tensor:
    """Ratio of the full-precision to the quantized policy at the moment of the rollout.

        ρ = π_prox / π_behav = exp(proximal_logps − behavior_logps)

    Where a NaN behaviour log-probability (the engine returned none) leaves nothing to correct by: ρ = 1 there.

    Source: the factor in front of Eq. 4.

    Args:
        proximal_logps: `(B, T)`.
        behavior_logps: `(B, T)`, may hold NaN.

    Returns:
        ρ, `(B, T)`.

    Raises:
        ValueError: the shapes differ or are not two-dimensional.
    """
    _check_shapes(proximal_logps=proximal_logps, behavior_logps=behavior_logps)
    log_ratio = (proximal_logps - behavior_logps).masked_fill(behavior_logps.isnan(), 0.0)  # (B, T)
    return log_ratio.exp()


def kept_share(rho: torch.Tensor, cap: float) -> torch.Tensor:
    """Share of the behaviour ratio that a cap on ρ keeps.

        r = min(1, C / ρ) = π_behav / max(π_behav, π_prox / C)

    Where C is `cap`: capping ρ at C is lifting π_behav to π_prox / C.

    Source: Eq. 6-7.

    Args:
        rho: `(B, T)`.
        cap: C, a ratio, finite and above 0.

    Returns:
        r in [0, 1], `(B, T)`, exactly 1 where ρ ≤ C.

    Raises:
        ValueError: `cap` is out of range.
    """
    _check_cap(cap)
    # `where`, not `clamp`: C / ρ rounds, and must not come out just below 1 where nothing was cut.
    return torch.where(rho > cap, cap / rho, 1.0)


def adaptive_clip_range(rho: torch.Tensor, cap: float, epsilon_low: float, epsilon_high: float) -> ClipRange:
    """Clip range whose upper bound rises where the cap cuts ρ, and whose lower bound never moves.

        1 − ε_low' = 1 − ε_low,    1 + ε_high' = (1 + ε_high) / r

    Where r is `kept_share(rho, cap)`.

    Source: Eq. 9, with DAPO's ε_low and ε_high in the place of its single ε.

    Args:
        rho: `(B, T)`.
        cap: C, a ratio, finite and above 0.
        epsilon_low: distance of the lower bound below 1.
        epsilon_high: distance of the upper bound above 1, before it is lifted.

    Returns:
        Both distances, each `(B, T)`; exactly `epsilon_low` and `epsilon_high` where ρ ≤ C.

    Raises:
        ValueError: `cap` is out of range.
    """
    lifted = (1.0 + epsilon_high) / kept_share(rho, cap) - 1.0  # (B, T)
    # (1 + ε) − 1 is not ε in floating point, so a bound that is not lifted does not come from the formula.
    return ClipRange(torch.full_like(rho, epsilon_low), torch.where(rho > cap, lifted, epsilon_high))


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

    Where old_logps, weight, ε_low and ε_high are the four terms returned.

    Source: Eq. 1, 3, 4, 5 and 9; `OBJECTIVES` says which is which.

    Args:
        objective: a name in `OBJECTIVES`.
        proximal_logps: `(B, T)`.
        behavior_logps: `(B, T)`, may hold NaN: ρ = 1 there, and π_prox stands in for π_behav below the ratio.
        cap: C, a ratio: the largest weight. Finite and above 0 for acr and tis; the others do not read it.
        floor: the smallest weight of acr and tis, a ratio; None for none (the paper has none).
        epsilon_low: distance of the lower clip bound below 1.
        epsilon_high: distance of the upper clip bound above 1.

    Returns:
        Four tensors `(B, T)`. They are detached because sampling is data, and no gradient flows through it.

    Raises:
        ValueError: unknown objective, shapes that differ, or a cap or floor out of range.
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
        cap = _check_cap(cap, floor)
        weight = rho.clamp(min=floor, max=cap)  # (B, T)

    clip_range = ClipRange(torch.full_like(rho, epsilon_low), torch.full_like(rho, epsilon_high))
    if preset.lifts_upper_bound:
        clip_range = adaptive_clip_range(rho, _check_cap(cap), epsilon_low, epsilon_high)
    return SurrogateTerms(old_logps, weight, *clip_range)


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
    floor: float | None = None,
    max_completion_length: int | None = None,
    num_items: float | None = None,
) -> torch.Tensor:
    """Loss of one micro-batch straight from the paper's equations: what the trainers are tested against.

        loss = − aggregate(J)

    Where J is the per-token objective and aggregate is TRL's for `loss_type`, without gradient accumulation.

    Source: Eq. 1, 3, 4, 5 and 9; for the aggregations, TRL's `GRPOTrainer._compute_loss`.

    Args:
        objective: a name in `OBJECTIVES`.
        policy_logps: `(B, T)`, the only input that gets a gradient.
        proximal_logps: `(B, T)`.
        behavior_logps: `(B, T)`, may hold NaN, as for `surrogate_terms`.
        advantages: `(B,)` or `(B, T)`.
        mask: `(B, T)`, non-zero on completion tokens.
        loss_type: grpo, bnpo, dr_grpo or dapo.
        epsilon_low: distance of the lower clip bound below 1.
        epsilon_high: distance of the upper clip bound above 1, before it is lifted.
        cap: C, a ratio, for acr and tis.
        floor: the smallest weight of acr and tis; None for none.
        max_completion_length: tokens; dr_grpo divides by it.
        num_items: completion tokens of the whole batch; dapo divides by it.

    Returns:
        Scalar to minimise.

    Raises:
        ValueError: as `surrogate_terms`; unknown loss type, or the number it divides by is missing.
    """
    _check_shapes(policy_logps=policy_logps, proximal_logps=proximal_logps, mask=mask)
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
        cap = _check_cap(cap, floor)
        weight = rho.clamp(min=floor, max=cap)  # (B, T), Eq. 5 for no floor
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
    if divisor is None:
        raise ValueError(
            f"Cannot average for loss_type={loss_type!r}. Choose grpo, bnpo, dr_grpo (needs max_completion_length) or "
            "dapo (needs num_items)."
        )
    return values.sum() / divisor


def _check_shapes(**tensors: torch.Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 2 for shape in shapes.values()):
        given = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"Expected one shape (B, T) for all, got {given}. Pad them to the same completion length.")


def _check_cap(cap: float | None, floor: float | None = None) -> float:
    if cap is None or not 0 < cap < math.inf:
        raise ValueError(
            f"Got cap={cap}. The largest importance ratio must be finite and above 0 (2 is usual); for no "
            "cap at all use the objective 'decoupled'."
        )
    if floor is not None and not 0 <= floor <= cap:
        raise ValueError(f"Got floor={floor} with cap={cap}. The floor must lie in [0, cap]; None means no floor.")
    return cap
