"""A metric over rollouts: of one run, smoothed, of a group of seeds; and its value at the end of training.

A rollout is the unit of all reports: runs that make different numbers of optimizer updates with the tokens of one
rollout can be laid over each other. Between two logged values a run counts as on the straight line that joins them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trl_qurl.trainers.run_log import Run

Values = NDArray[np.float64]

FINAL_ROLLOUTS = 20
"""What counts as the end of training: single rollouts are noisy, and the end should not depend on the last one."""

SMOOTHED_SHARE = 1 / 20
"""Share of the longest run over which curves are averaged."""

SHORTEST_SMOOTHED = 40
"""Rollouts of the longest run below which curves stay as they are."""

STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantile of Student's t for 1 to 10 degrees of freedom."""


class Points(NamedTuple):
    """A metric of one run, wherever it was logged with a finite value; both (N,), rollouts ascending."""

    rollouts: Values
    values: Values


class Curve(NamedTuple):
    """A metric of a group; all (N,). Of a single run, `low` and `high` are its `mean`."""

    rollouts: Values
    mean: Values
    low: Values
    high: Values


class Estimate(NamedTuple):
    """A mean over seeds and half the width of its 95 % confidence interval, `None` for a single seed."""

    mean: float
    half_width: float | None


def updates_per_rollout(run: Run) -> float | None:
    """Optimizer updates made with the tokens of one rollout, if the run's settings say so."""
    updates = run.settings.get("updates_per_rollout")
    return float(updates) if isinstance(updates, int | float) and updates > 0 else None


def rollouts_of(run: Run) -> float:
    """Length of a run that has rows."""
    return max(row["step"] for row in run.rows) / (updates_per_rollout(run) or 1.0)


def points_of(run: Run, metric: str) -> Points:
    """The metric over rollouts, which are steps where the settings do not say how many make a rollout."""
    updates = updates_per_rollout(run) or 1.0
    logged = [(step / updates, value) for step, value in run.series(metric) if math.isfinite(value)]
    rollouts, values = np.array(logged, dtype=np.float64).reshape(-1, 2).T
    return Points(rollouts, values)


def smoothing_window(longest: float) -> int:
    """Rollouts over which curves are averaged, odd; 1 for runs that are too short to need it."""
    return 1 if longest < SHORTEST_SMOOTHED else int(longest * SMOOTHED_SHARE) // 2 * 2 + 1


def smooth(points: Points, window: int, largest: bool = False) -> Points:
    """The mean, or the largest, of the values at most (window − 1) / 2 rollouts away; fewer at either end."""
    if not points.values.size or window == 1:
        return points
    reach = (window - 1) / 2
    starts = np.searchsorted(points.rollouts, points.rollouts - reach, side="left")
    ends = np.searchsorted(points.rollouts, points.rollouts + reach, side="right")
    # reduceat goes from each index to the next, so every other result is what lies between an end and a next start.
    slices = np.stack([starts, ends], axis=1).ravel()
    padded = np.append(points.values, 0.0)  # an end may lie one past the last value
    reduced = (np.maximum if largest else np.add).reduceat(padded, slices)[::2]
    return Points(points.rollouts, reduced if largest else reduced / (ends - starts))


def across_seeds(seeds: Sequence[Points]) -> Curve:
    """Mean and range over the seeds, wherever one has a value; each counts from its first value to its last."""
    seeds = [seed for seed in seeds if seed.values.size]
    if not seeds:
        return Curve(*(np.empty(0) for _ in range(4)))
    rollouts = np.unique(np.concatenate([seed.rollouts for seed in seeds]))
    # (seeds, N), NaN before a seed's first value and after its last
    values = np.stack(
        [np.interp(rollouts, seed.rollouts, seed.values, left=math.nan, right=math.nan) for seed in seeds]
    )
    inside = ~np.isnan(values).all(axis=0)  # between two seeds that do not overlap there is nothing
    values = values[:, inside]
    return Curve(rollouts[inside], np.nanmean(values, axis=0), np.nanmin(values, axis=0), np.nanmax(values, axis=0))


def final_value(points: Points) -> float | None:
    """Mean of the values of the last `FINAL_ROLLOUTS` rollouts in which the metric was logged."""
    if not points.values.size:
        return None
    return float(points.values[points.rollouts > points.rollouts[-1] - FINAL_ROLLOUTS].mean())


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and confidence interval (Student's t) of one value per seed."""
    if not values:
        return None
    mean = float(np.mean(values))
    if len(values) == 1:
        return Estimate(mean, None)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, student_t(len(values) - 1) * error)


def student_t(degrees: int) -> float:
    """97.5 % quantile of Student's t: tabled, then its expansion in 1 / degrees (Abramowitz and Stegun 26.7.5)."""
    if degrees <= len(STUDENT_T):
        return STUDENT_T[degrees - 1]
    z = 1.959964
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3
