"""Statistics of scored answers: KL, the tail of the ratio, effective sample size.

ρ is the ratio of a token: the full-precision policy's probability over
the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from trl_qurl.lab.evaluation.scores import Estimate

CAP = 2.0
"""The objectives' default C."""

QUANTILES = (0.001, 0.01, 0.5, 0.99, 0.999)
RESAMPLES = 2000
LEAST_QUESTIONS = 4
"""Fewest questions whose scatter indicates the error of the mean on other questions."""


class Scored(NamedTuple):
    """One answer of `T` tokens under both policies."""

    question: tuple[int, ...]  # prompt tokens
    # log-probabilities under the policy minus those under the engine, in nats, float64, (T,)
    log_ratio: torch.Tensor
    # KL(engine ‖ policy) at each token, where both distributions are known, in nats, (T,)
    kl: torch.Tensor | None = None


@dataclass(frozen=True)
class Mismatch:
    """Mismatch between engine and policy for one model in one format."""

    answers: int  # their number, n
    tokens: int  # in all answers
    # estimate of KL(engine ‖ policy) as the mean of ρ − 1 − log ρ, in nats per token; exact for a
    # simulated cache
    kl_k3: Estimate
    ratio_quantiles: dict[float, float]  # of ρ over tokens, by share
    capped_share: float  # share of tokens with ρ above the cap
    ess: float  # effective sample size of the tokens, as a share


def measure(scored: Sequence[Scored]) -> Mismatch:
    """Compute the statistics of one format.

    KL, share above the cap and ESS match the logged `mismatch/*` metrics.
    """
    if not scored:
        raise ValueError("All answers are empty: the model stops immediately. Try other questions.")
    flat = torch.cat([row.log_ratio for row in scored])
    if not flat.isfinite().all():
        raise ValueError(
            "The engine returned log-probabilities that are not finite: try --scheme none, and run "
            "`trl-qurl doctor`."
        )
    ratios = flat.exp()
    kl_k3 = interval(scored, [kl_of(row) for row in scored])
    return Mismatch(
        answers=len(scored),
        tokens=len(ratios),
        kl_k3=replace(kl_k3, low=max(0.0, kl_k3.low)),
        ratio_quantiles={share: float(torch.quantile(ratios, share)) for share in QUANTILES},
        capped_share=float((ratios > CAP).double().mean()),
        ess=float(ratios.sum() ** 2 / (len(ratios) * ratios.square().sum())),
    )


def kl_of(row: Scored) -> torch.Tensor:
    """Return the KL at each token of an answer: exact if known, else its estimate k3, (T,)."""
    if row.kl is not None:
        return row.kl
    return row.log_ratio.expm1() - row.log_ratio


def interval(scored: Sequence[Scored], values: Sequence[torch.Tensor]) -> Estimate:
    """Return a mean over tokens with its 95 % interval, resampling questions (bootstrap-t).

    Answers to one question are correlated, and a model is far more certain of some answers than of
    others. Plain percentiles of the means would be too narrow: with 16 such questions they cover
    the truth 88 % of the time. With fewer than `LEAST_QUESTIONS`, answers are resampled. `values`
    has one value per token, by answer.
    """
    questions = list(dict.fromkeys(row.question for row in scored))
    numbers = [questions.index(row.question) for row in scored]
    if len(questions) < LEAST_QUESTIONS:
        numbers = list(range(len(scored)))  # each answer by itself
    groups = torch.tensor(numbers)
    rows = torch.tensor([(float(each.sum()), len(each)) for each in values], dtype=torch.float64)
    sums = rows.new_zeros(max(numbers) + 1, 2).index_add(0, groups, rows)  # (Q, 2)
    totals, counts = sums.T
    generator = torch.Generator().manual_seed(0)
    resamples = torch.randint(len(counts), (RESAMPLES, len(counts)), generator=generator)
    mean, error = _mean_and_error(totals, counts)
    means, errors = _mean_and_error(totals[resamples], counts[resamples])
    varied = errors > 1e-9 * error  # drop resamples that repeat a single question
    if not varied.any():
        return Estimate(float(mean), float(mean), float(mean))
    scores = ((means - mean) / errors)[varied]
    low, high = scores.quantile(torch.tensor([0.025, 0.975], dtype=scores.dtype))
    return Estimate(float(mean), float(mean - high * error), float(mean - low * error))


def _mean_and_error(
    totals: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean per token and, up to a constant factor, its standard error.

    The arguments are sums by question, (..., Q).
    """
    mean = totals.sum(-1) / counts.sum(-1)
    residuals = totals - mean[..., None] * counts
    return mean, residuals.square().sum(-1).sqrt() / counts.sum(-1)
