"""Metrics of a run over rollouts.

Rollouts are counted instead of optimizer steps, so runs with different numbers of updates per rollout are comparable.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trl_qurl.trainers.run_log import Run

Values = NDArray[np.float64]

FINAL_ROLLOUTS = 20
"""Number of rollouts to average for a final value, because single rollouts are noisy."""

# Okabe and Ito's colors, except for yellow: it is too light for a line. Dashes are for print and color-blind readers.
COLORS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (3, 1, 1, 1, 1, 1)))


class Points(NamedTuple):
    """Finite values of a metric; both (N,), rollouts ascending."""

    rollouts: Values
    values: Values


def updates_per_rollout(run: Run) -> float:
    """Return the optimizer updates per rollout; 1 if the run's settings do not include them."""
    return float(run.settings.get("updates_per_rollout") or 1)


def points_of(run: Run, metric: str) -> Points:
    """Return the finite values of a metric over rollouts."""
    updates = updates_per_rollout(run)
    logged = [(step / updates, value) for step, value in run.series(metric) if math.isfinite(value)]
    return Points(*np.array(logged, dtype=np.float64).reshape(-1, 2).T)


def final_value(points: Points, window: int = FINAL_ROLLOUTS) -> float | None:
    """Average the metric over the `window` rollouts up to its last logged value."""
    if not points.values.size:
        return None
    return float(points.values[points.rollouts > points.rollouts[-1] - window].mean())


def smooth(points: Points, window: float) -> Points:
    """Average each value with those within (window − 1) / 2 rollouts; fewer near the ends."""
    near = np.abs(points.rollouts[:, None] - points.rollouts) <= (window - 1) / 2  # (N, N)
    return Points(points.rollouts, near @ points.values / near.sum(1))
