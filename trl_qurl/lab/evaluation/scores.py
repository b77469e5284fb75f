"""Scores of graded answers: Avg@k, pass@k, and their intervals. `Q` questions with `k` answers each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance

Z95 = 1.959963984540054  # quantile of the normal distribution for a 95 % interval


@dataclass(frozen=True)
class Estimate:
    """A share in [0, 1], or a difference of two in [−1, 1], with its 95 % interval."""

    value: float  # the estimate
    low: float  # lower end of the interval
    high: float  # upper end of the interval


def average_at_k(graded: Sequence[Sequence[bool]]) -> Estimate:
    r"""Return the share of correct answers, Avg@k; with one answer per question, the accuracy.

    $$p = \frac{1}{Q} \sum_q p_q, \qquad n = \frac{p (1 - p)}{\mathrm{Var}(p_q) / Q}, \qquad
      \frac{p + z^2/2n \pm z \sqrt{p (1 - p) / n + z^2 / 4n^2}}{1 + z^2/n}$$

    Where p_q is the share for one question, n the effective number of independent answers, and the last term the
    Wilson interval. The questions are the sample: more answers to the same questions narrow the interval only as far
    as the answers to one question differ. For k = 1, n is Q.

    Source: E. B. Wilson, "Probable inference" (1927); n is Kish's effective sample size.

    Args:
        graded: Correctness of each answer, (Q, k).

    Returns:
        The share with its Wilson interval.

    Raises:
        ValueError: If there are no questions, or a question has no answers.
    """
    if not graded or not all(graded):
        raise ValueError("Answers are missing: give at least one question, and at least one answer to each.")
    shares = [fmean(answers) for answers in graded]  # (Q,)
    value, spread = fmean(shares), pvariance(shares)
    size = float(len(shares))  # if all answers are correct or all wrong, each question counts once
    if 0 < value < 1:
        answers = sum(map(len, graded))
        size = min(answers, value * (1 - value) * len(shares) / spread) if spread > 0 else answers
    center = (value + Z95**2 / (2 * size)) / (1 + Z95**2 / size)
    half = Z95 * math.sqrt(value * (1 - value) / size + Z95**2 / (4 * size**2)) / (1 + Z95**2 / size)
    return Estimate(value, max(0.0, center - half), min(1.0, center + half))


def pass_at_k(graded: Sequence[Sequence[bool]], k: int) -> float:
    r"""Return an unbiased estimate of the share of questions that k answers solve, from n ≥ k answers to each.

    $$\frac{1}{Q} \sum_q \Big(1 - \binom{n_q - c_q}{k} / \binom{n_q}{k}\Big)$$

    Where c_q of the n_q answers to a question are correct.

    Source: Chen et al. 2021 (arXiv:2107.03374), Eq. 1.

    Args:
        graded: Correctness of each answer, (Q, n).
        k: Number of answers to draw.

    Returns:
        The share, in [0, 1].

    Raises:
        ValueError: If a question has fewer than k answers.
    """
    if not 1 <= k <= min(map(len, graded), default=0):
        raise ValueError(f"pass@{k} needs at least {k} answers to each question.")
    return fmean(1 - math.comb(len(a) - sum(a), k) / math.comb(len(a), k) for a in graded)


def paired_difference(graded: Sequence[Sequence[bool]], baseline: Sequence[Sequence[bool]]) -> Estimate:
    r"""Return the difference in accuracy between two sets of answers to the same questions.

    $$\tilde{d} \pm z \sqrt{\Big(\frac{1 + \sum_q d_q^2}{Q + 2} - \tilde{d}^2\Big) / (Q + 2)}, \qquad
      \tilde{d} = \frac{\sum_q d_q}{Q + 2}$$

    Where d_q is the difference of a question's two shares of correct answers; the value is their plain mean. The two
    added questions keep the interval from collapsing if the sets do not differ on any question. Questions that both
    solve, or neither, do not widen the interval, so it is narrower than the two separate intervals suggest.

    Source: A. Agresti and Y. Min, "Simple improved confidence intervals for comparing matched proportions" (2005).

    Args:
        graded: Correctness of each answer, (Q, k).
        baseline: The same for the answers to compare with, (Q, k').

    Returns:
        The difference of the two shares, positive if `graded` is better.

    Raises:
        ValueError: If the numbers of questions differ.
    """
    if len(graded) != len(baseline):
        raise ValueError(f"Cannot pair {len(graded)} questions with {len(baseline)}: evaluate both on the same task.")
    differences = [fmean(ours) - fmean(theirs) for ours, theirs in zip(graded, baseline, strict=True)]  # (Q,)
    size = len(differences) + 2
    center = sum(differences) / size
    variance = (1 + sum(difference**2 for difference in differences)) / size - center**2
    half = Z95 * math.sqrt(variance / size)
    return Estimate(fmean(differences), max(-1.0, center - half), min(1.0, center + half))
