"""Metrics of a run over rollouts.

Rollouts are counted instead of optimizer steps, so runs with different numbers of updates per
rollout are comparable.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trl_qurl.lab.runs import Run

Values = NDArray[np.float64]

FINAL_ROLLOUTS = 20
"""Number of rollouts to average for a final value, because single rollouts are noisy."""

# Okabe and Ito's colors, except for yellow: it is too light for a line. Dashes are for print and
# color-blind readers.
COLORS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = (
    "-",
    (0, (5, 1.5)),
    (0, (1.2, 1.2)),
    (0, (6, 1.5, 1.2, 1.5)),
    (0, (3, 1, 1, 1, 1, 1)),
)


class Points(NamedTuple):
    """Finite values of a metric; both (N,), rollouts ascending."""

    rollouts: Values
    values: Values


def points_of(run: Run, metric: str) -> Points:
    """Return the finite values of a metric over rollouts.

    A row from within a rollout counts for that rollout.
    """
    updates = run.settings.get("updates_per_rollout") or 1
    logged = [
        (math.ceil(step / updates), value)
        for step, value in run.series(metric)
        if math.isfinite(value)
    ]
    columns = np.array(logged, dtype=np.float64).reshape(-1, 2).T
    return Points(*columns)


def final_value(points: Points, window: int = FINAL_ROLLOUTS) -> float | None:
    """Average the metric over the `window` rollouts up to its last logged value."""
    values = points.values[points.rollouts > max(points.rollouts, default=0) - window]
    return float(values.mean()) if values.size else None


def interval(points: Points, answers: Points) -> tuple[Values, Values]:
    """Return the ends of Wilson's 95 % intervals of shares of right answers.

    `answers` has the number of answers at each point.
    """
    z2 = 1.96**2
    n = np.interp(points.rollouts, answers.rollouts, answers.values)
    share = points.values
    scale = 1 + z2 / n
    center = share + z2 / (2 * n)
    half = np.sqrt(z2 * (share * (1 - share) + z2 / (4 * n)) / n)
    return (center - half) / scale, (center + half) / scale


def smooth(points: Points, window: float) -> Points:
    """Average each value with those within (window − 1) / 2 rollouts.

    Single rollouts are noisy.
    """
    near = np.abs(points.rollouts[:, None] - points.rollouts) <= (window - 1) / 2  # (N, N)
    return Points(points.rollouts, near @ points.values / near.sum(1))
