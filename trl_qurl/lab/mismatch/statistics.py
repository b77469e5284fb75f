"""From scored answers to figures: KL, the tail of the ratio, effective sample sizes, agreement.

`n` answers of `T_i` tokens; ρ is the ratio of a token, the full-precision policy's probability over the engine's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trl_qurl.lab.mismatch.score import Scored

if TYPE_CHECKING:
    import torch

CAP = 2.0
"""C of the objectives by default."""

QUANTILES = (0.001, 0.01, 0.5, 0.99, 0.999)
RESAMPLES = 2000
LEAST_ANSWERS = 8
"""Answers that must have a length, so that their effective sample size is told."""


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Mismatch:
    """What rounding does to one model in one format.

    Attributes:
        answers: Number of answers, n.
        tokens: Number of their tokens.
        kl_k1: Estimate of KL(engine ‖ policy) by −log ρ, in nats per token.
        kl_k3: The same by ρ − 1 − log ρ, which is never negative and scatters less.
        ratio_quantiles: Of ρ over tokens, by share.
        ratio_max: The largest ρ.
        capped_share: Share of tokens with ρ above the cap.
        ess: Effective sample size of the tokens, as a share.
        sequence_ess: The same of whole answers cut to a length, whose weight is the product of their ρ, by length.
        half_length: Tokens after which that share falls to a half, extrapolated; `None` if nothing differs.
        agreement: Share of tokens at which both policies have the same likeliest token.
    """

    answers: int
    tokens: int
    kl_k1: Interval
    kl_k3: Interval
    ratio_quantiles: dict[float, float]
    ratio_max: float
    capped_share: float
    ess: float
    sequence_ess: dict[int, float]
    half_length: float | None
    agreement: float


def measure(scored: Sequence[Scored], cap: float = CAP) -> Mismatch:
    """Figures of one format. The KL, the share above the cap and the ESS are those that training logs (`mismatch/*`).

    Args:
        scored: Answers under both policies.
        cap: C, a ratio.

    Returns:
        The figures.

    Raises:
        ValueError: There are no answers, or an engine's log-probability is not a number.
    """
    import torch

    from trl_qurl.rollout.mismatch import mismatch_metrics, mismatch_sums

    if not scored:
        raise ValueError("Every answer is empty: the model ends at once. Give other questions.")
    pairs = [(row.proximal_logps[None], row.behavior_logps[None]) for row in scored]  # (1, T) each
    sums, largest = zip(*(mismatch_sums(*pair, torch.ones_like(pair[0]), cap) for pair in pairs), strict=True)
    per_answer = torch.stack(sums)  # (n, 5)
    if per_answer[:, 0].sum() != sum(len(row.agrees) for row in scored) or not per_answer.isfinite().all():
        raise ValueError("The engine gave log-probabilities that are not numbers: its weights are broken.")
    logged = mismatch_metrics(per_answer.sum(0), max(map(float, largest)))
    kl_k1, kl_k3 = intervals(per_answer)
    log_ratios = [row.proximal_logps.double() - row.behavior_logps.double() for row in scored]
    ratios = torch.cat(log_ratios).exp()
    return Mismatch(
        answers=len(scored),
        tokens=len(ratios),
        kl_k1=kl_k1,
        kl_k3=kl_k3,
        ratio_quantiles={share: float(torch.quantile(ratios, share)) for share in QUANTILES},
        ratio_max=logged["mismatch/ratio_max"],
        capped_share=logged["mismatch/capped_share"],
        ess=logged["mismatch/ess"],
        sequence_ess=sequence_ess(log_ratios),
        half_length=half_length(log_ratios),
        agreement=float(torch.cat([row.agrees for row in scored]).double().mean()),
    )


def intervals(sums: torch.Tensor) -> tuple[Interval, Interval]:
    """KL by k1 and by k3 with 95 % intervals: percentiles over answers drawn again, since tokens of one depend.

    Args:
        sums: For each answer the first three sums of `mismatch_sums` (1, log ρ, ρ), and more, (n, ≥3).
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(sums), (RESAMPLES, len(sums)), generator=generator)
    resampled = torch.stack([sums[row].sum(0) for row in drawn])  # (RESAMPLES, 5)

    def kls(totals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count, log_ratio, ratio = totals[..., 0], totals[..., 1], totals[..., 2]
        return -log_ratio / count, (ratio - count - log_ratio) / count

    found = []
    for value, values in zip(kls(sums.sum(0)), kls(resampled), strict=True):
        low, high = values.quantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
        found.append(Interval(float(value), low, high))
    return found[0], found[1]


def sequence_ess(log_ratios: Sequence[torch.Tensor]) -> dict[int, float]:
    r"""Effective sample size of answers weighted by their product of ratios, as a share, by length.

    $$\frac{(\sum_i w_i)^2}{n \sum_i w_i^2}, \qquad w_i = \prod_{t \le L} \rho_{i,t}$$

    Over the n answers that have at least L tokens, for L = 1, 2, 4, ... while there are `LEAST_ANSWERS` of them. Few
    answers overstate it where the tail is heavy.
    """
    import torch

    found: dict[int, float] = {}
    length = 1
    while True:
        weights = [row[:length].sum() for row in log_ratios if len(row) >= length]
        if len(weights) < LEAST_ANSWERS:
            return found
        scaled = (torch.stack(weights) - max(weights)).exp()
        found[length] = float(scaled.sum() ** 2 / (len(scaled) * scaled.square().sum()))
        length *= 2


def half_length(log_ratios: Sequence[torch.Tensor]) -> float | None:
    r"""Tokens after which the effective sample size of whole answers falls to a half.

    $$L_{1/2} = \frac{\ln 2}{v}, \qquad v = \frac{\sum_i (S_i - m T_i)^2}{\sum_i T_i}, \qquad
      m = \frac{\sum_i S_i}{\sum_i T_i}$$

    With S_i an answer's sum of log ρ. If the S_i are normal with a variance of v per token, the effective sample size
    is $e^{-v L}$. Heavier tails make it fall sooner.

    Returns:
        A number of tokens; `None` if nothing differs.
    """
    import torch

    lengths = torch.tensor([len(row) for row in log_ratios], dtype=torch.float64)
    sums = torch.stack([row.sum() for row in log_ratios])
    mean = sums.sum() / lengths.sum()
    variance = float((sums - mean * lengths).square().sum() / lengths.sum())
    return math.log(2) / variance if variance > 0 else None
