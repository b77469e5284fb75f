"""Statistics of scored answers: KL, the tail of the ratio, effective sample size, agreement.

`n` answers of `T_i` tokens. ρ is the ratio of a token: the full-precision policy's probability over the engine's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from trl_qurl.lab.evaluation.scores import Estimate
from trl_qurl.lab.mismatch.answers import Scored

CAP = 2.0
"""The objectives' default C."""

QUANTILES = (0.001, 0.01, 0.5, 0.99, 0.999)
RESAMPLES = 2000
LEAST_QUESTIONS = 4
"""Minimum number of questions for their scatter to indicate the error of the mean on other questions."""


@dataclass(frozen=True)
class Mismatch:
    """Mismatch between engine and policy for one model in one format."""

    answers: int  # their number, n
    tokens: int  # in all answers
    kl_k3: Estimate  # estimate of KL(engine ‖ policy) as the mean of ρ − 1 − log ρ, in nats per token
    ratio_quantiles: dict[float, float]  # of ρ over tokens, by share
    capped_share: float  # share of tokens with ρ above the cap
    ess: float  # effective sample size of the tokens, as a share
    half_length: float | None  # see `half_length`
    agreement: float  # share of tokens where both policies have the same most likely token


def measure(scored: Sequence[Scored]) -> Mismatch:
    """Compute the statistics of one format. KL, share above the cap and ESS match the logged `mismatch/*` metrics.

    Raises:
        ValueError: If all answers are empty, or an engine's log-probability is not finite.
    """
    if not scored:
        raise ValueError("All answers are empty: the model stops immediately. Try other questions.")
    log_ratios = [row.proximal_logps.double() - row.behavior_logps.double() for row in scored]
    flat = torch.cat(log_ratios)
    if not flat.isfinite().all():
        raise ValueError("The engine returned log-probabilities that are not finite: its weights are broken.")
    ratios = flat.exp()
    kl_k3 = interval([row.expm1() - row for row in log_ratios], by_question(scored))
    return Mismatch(
        answers=len(scored),
        tokens=len(ratios),
        kl_k3=replace(kl_k3, low=max(0.0, kl_k3.low)),
        ratio_quantiles={share: float(torch.quantile(ratios, share)) for share in QUANTILES},
        capped_share=float((ratios > CAP).double().mean()),
        ess=float(ratios.sum() ** 2 / (len(ratios) * ratios.square().sum())),
        half_length=half_length(log_ratios),
        agreement=float(torch.cat([row.agrees for row in scored]).double().mean()),
    )


def by_question(scored: Sequence[Scored]) -> list[list[int]]:
    """Group answer indices by question; with fewer than `LEAST_QUESTIONS`, each answer is a separate group."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(scored):
        groups.setdefault(row.question, []).append(index)
    return list(groups.values()) if len(groups) >= LEAST_QUESTIONS else [[index] for index in range(len(scored))]


def interval(values: Sequence[torch.Tensor], questions: Sequence[Sequence[int]]) -> Estimate:
    """Return a mean over tokens with its 95 % interval, resampling questions (bootstrap-t).

    Answers to one question are correlated, and a model is far more certain of some answers than of others.
    Plain percentiles of the means would be too narrow: with 16 such questions they cover the truth 88 % of the time.

    Args:
        values: One value per token, by answer.
        questions: Indices of the answers to each question.
    """
    counts = torch.tensor([sum(len(values[i]) for i in answers) for answers in questions]).double()  # (Q,)
    totals = torch.stack([torch.stack([values[i].sum() for i in answers]).sum() for answers in questions])  # (Q,)
    resamples = torch.randint(len(counts), (RESAMPLES, len(counts)), generator=torch.Generator().manual_seed(0))
    mean, error = _mean_and_error(totals, counts)
    means, errors = _mean_and_error(totals[resamples], counts[resamples])
    varied = errors > 1e-9 * error  # drop resamples that repeat a single question
    if not varied.any():
        return Estimate(float(mean), float(mean), float(mean))
    scores = ((means - mean) / errors)[varied]
    low, high = scores.quantile(torch.tensor([0.025, 0.975], dtype=scores.dtype))
    return Estimate(float(mean), float(mean - high * error), float(mean - low * error))


def _mean_and_error(totals: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean per token and, up to a constant factor, its standard error, from totals (..., Q)."""
    mean = totals.sum(-1) / counts.sum(-1)
    residuals = totals - mean[..., None] * counts
    return mean, residuals.square().sum(-1).sqrt() / counts.sum(-1)


def half_length(log_ratios: Sequence[torch.Tensor]) -> float | None:
    r"""Estimate the length at which the effective sample size of whole answers drops to one half.

    $$L_{1/2} = \frac{\ln 2}{v}, \qquad v = \frac{\sum_i (S_i - m T_i)^2}{\sum_i T_i}, \qquad
      m = \frac{\sum_i S_i}{\sum_i T_i}$$

    Where S_i is an answer's sum of log ρ. If the S_i are normal with variance v per token, the effective sample size
    is $e^{-v L}$. With heavier tails it drops sooner.

    Returns:
        A number of tokens; `None` without any mismatch.
    """
    lengths = torch.tensor([len(row) for row in log_ratios], dtype=torch.float64)
    sums = torch.stack([row.sum() for row in log_ratios])
    mean = sums.sum() / lengths.sum()
    variance = float((sums - mean * lengths).square().sum() / lengths.sum())
    return math.log(2) / variance if variance > 0 else None
