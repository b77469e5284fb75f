"""Accuracy, and its difference between two sets of answers to the same questions, with intervals.

The questions are the sample: more answers to the same questions narrow an interval only as far as
the answers to one question differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

Z95 = 1.959963984540054  # quantile of the normal distribution for a 95 % interval


@dataclass(frozen=True)
class Estimate:
    """An estimate with its 95 % interval."""

    value: float  # the estimate
    low: float  # lower end of the interval
    high: float  # upper end of the interval


def average_at_k(graded: Sequence[Sequence[bool]]) -> Estimate:
    r"""Return the share of correct answers, Avg@k; with one answer per question, the accuracy.

    $$\tilde{p} \pm z \sqrt{\Big(\frac{2 + \sum_q p_q^2}{Q + 4} - \tilde{p}^2\Big) / (Q + 4)},
      \qquad
      \tilde{p} = \frac{2 + \sum_q p_q}{Q + 4}$$

    Where p_q is the share for one question; the value is their plain mean. The four added
    questions, two of them solved, keep the interval from collapsing if all answers are right or all
    wrong.

    Source: A. Agresti and B. Coull, "Approximate is better than 'exact' for interval estimation"
    (1998), for k = 1.

    Args:
        graded: Correctness of each answer, (Q, k).

    Returns:
        The share with its interval.
    """
    return _mean([fmean(answers) for answers in graded], added=(1.0, 1.0, 0.0, 0.0), lowest=0.0)


def paired_difference(
    graded: Sequence[Sequence[bool]], baseline: Sequence[Sequence[bool]]
) -> Estimate:
    r"""Return the difference in accuracy between two sets of answers to the same questions.

    $$\tilde{d} \pm z \sqrt{\Big(\frac{1 + \sum_q d_q^2}{Q + 2} - \tilde{d}^2\Big) / (Q + 2)},
      \qquad
      \tilde{d} = \frac{\sum_q d_q}{Q + 2}$$

    Where d_q is the difference of a question's two shares of correct answers; the value is their
    plain mean. The two added questions keep the interval from collapsing if the sets do not differ
    on any question. Questions that both solve, or neither, do not widen the interval, so it is
    narrower than the two separate intervals suggest.

    Source: A. Agresti and Y. Min, "Simple improved confidence intervals for comparing matched
    proportions" (2005).

    Args:
        graded: Correctness of each answer, (Q, k).
        baseline: The same for the answers to compare with, (Q, k').

    Returns:
        The difference of the two shares, positive if `graded` is better.
    """
    pairs = zip(graded, baseline, strict=True)
    differences = [fmean(ours) - fmean(theirs) for ours, theirs in pairs]  # (Q,)
    # Two questions whose squares add up to 1.
    return _mean(differences, added=(math.sqrt(0.5), -math.sqrt(0.5)), lowest=-1.0)


def _mean(values: Sequence[float], added: Sequence[float], lowest: float) -> Estimate:
    """Return the mean of values in [lowest, 1], with the interval of these and the added ones."""
    sample = [*values, *added]
    center = fmean(sample)
    variance = fmean(value**2 for value in sample) - center**2
    half = Z95 * math.sqrt(variance / len(sample))
    return Estimate(fmean(values), max(lowest, center - half), min(1.0, center + half))
