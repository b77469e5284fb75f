"""Metrics over rollouts: single runs, smoothing, groups of seeds, final values; and the time spent per rollout.

All reports count rollouts, so runs with different numbers of optimizer updates per rollout can be compared. Values
between two logged ones are interpolated linearly.
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
"""Number of rollouts to average for a final value, because single rollouts are noisy."""

STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantile of Student's t for 1 to 10 degrees of freedom."""

TIMES = {
    "generation": "time/generate_s",
    "gathering, rounding": "time/quantize_s",
    "sending": "time/sync_s",
    "checks": "time/sync_check_s",
    "log-probabilities": "time/logps_s",
    "values": "time/values_s",
    "updates": "time/update_s",
    "other": "step_time",
}
"""Parts of a rollout's time, with the metric for each."""


class Points(NamedTuple):
    """Finite logged values of a metric in one run; both (N,), rollouts ascending."""

    rollouts: Values
    values: Values


class Curve(NamedTuple):
    """A metric of a group; all (N,). For a single run, `low` and `high` equal `mean`."""

    rollouts: Values
    mean: Values
    low: Values
    high: Values


class Estimate(NamedTuple):
    """A mean over seeds and half the width of its 95 % confidence interval, `None` for a single seed."""

    mean: float
    half_width: float | None


def updates_per_rollout(run: Run) -> float:
    """Return the optimizer updates per rollout; 1 if the run's settings do not include them."""
    updates = run.settings.get("updates_per_rollout")
    return float(updates) if isinstance(updates, int | float) and updates > 0 else 1.0


def rollouts_of(run: Run) -> float:
    """Return the length of a run in rollouts; the run must have rows."""
    return max(row["step"] for row in run.rows) / updates_per_rollout(run)


def points_of(run: Run, metric: str) -> Points:
    """Return a metric over rollouts, or over steps if the settings do not include the updates per rollout."""
    updates = updates_per_rollout(run)
    logged = [(step / updates, value) for step, value in run.series(metric) if math.isfinite(value)]
    rollouts, values = np.array(logged, dtype=np.float64).reshape(-1, 2).T
    return Points(rollouts, values)


def smoothing_window(longest: float) -> int:
    """Choose the smoothing window in rollouts: odd, 1/20 of the longest run; 1 (no smoothing) below 40 rollouts."""
    return 1 if longest < 40 else int(longest / 20) // 2 * 2 + 1


def smooth(points: Points, window: int, largest: bool = False) -> Points:
    """Replace each value with the mean or maximum within (window − 1) / 2 rollouts; fewer near the ends."""
    reach = (window - 1) / 2
    starts = np.searchsorted(points.rollouts, points.rollouts - reach, side="left")
    ends = np.searchsorted(points.rollouts, points.rollouts + reach, side="right")
    combine = np.max if largest else np.mean
    smoothed = [combine(points.values[start:end]) for start, end in zip(starts, ends, strict=True)]
    return Points(points.rollouts, np.array(smoothed, dtype=np.float64))


def across_seeds(seeds: Sequence[Points]) -> Curve:
    """Compute mean and range over the seeds; each seed contributes between its first and last value."""
    seeds = [seed for seed in seeds if seed.values.size]
    if not seeds:
        return Curve(*(np.empty(0) for _ in range(4)))
    rollouts = np.unique(np.concatenate([seed.rollouts for seed in seeds]))
    # (seeds, N), NaN before a seed's first value and after its last
    values = np.stack(
        [np.interp(rollouts, seed.rollouts, seed.values, left=math.nan, right=math.nan) for seed in seeds]
    )
    inside = ~np.isnan(values).all(axis=0)  # excludes gaps between seeds that do not overlap
    values = values[:, inside]
    return Curve(rollouts[inside], np.nanmean(values, axis=0), np.nanmin(values, axis=0), np.nanmax(values, axis=0))


def final_value(points: Points, window: int = FINAL_ROLLOUTS) -> float | None:
    """Average the metric over the `window` rollouts up to its last logged value."""
    if not points.values.size:
        return None
    return float(points.values[points.rollouts > points.rollouts[-1] - window].mean())


def estimate(values: Sequence[float]) -> Estimate | None:
    """Compute the mean and a Student-t interval from one value per seed; conservative above 11 seeds."""
    if not values:
        return None
    mean = float(np.mean(values))
    if len(values) == 1:
        return Estimate(mean, None)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, STUDENT_T[min(len(values) - 1, len(STUDENT_T)) - 1] * error)


def seconds_per_rollout(run: Run) -> dict[str, float]:
    """Average the seconds of each logged part, without the first rollout, which includes the warm-up.

    Most metrics are logged once per rollout, but `time/update_s` and `step_time` once per optimizer update. TRL's
    `step_time` includes the rollout, but not the optimizer step or a critic's update, so "other" is a lower bound.
    """
    updates = updates_per_rollout(run)
    seconds = {part: mean for part, metric in TIMES.items() if (mean := _mean(run, metric)) is not None}
    step = seconds.pop("other", None)
    if "sending" in seconds:
        seconds["sending"] = max(0.0, seconds["sending"] - seconds.get("gathering, rounding", 0.0))
    if "updates" in seconds:
        seconds["updates"] *= updates
    if step is not None and "updates" in seconds and "generation" in seconds:
        covered = sum(seconds.values()) - updates * (_mean(run, "time/critic_update_s") or 0.0)
        seconds["other"] = max(0.0, updates * step - covered)
    return seconds


def mean_seconds(runs: Sequence[Run]) -> dict[str, float]:
    """Average each part over the runs that logged it."""
    splits = [seconds_per_rollout(run) for run in runs]
    logged = {part: [split[part] for split in splits if part in split] for part in TIMES}
    return {part: float(np.mean(values)) for part, values in logged.items() if values}


def _mean(run: Run, metric: str) -> float | None:
    values = points_of(run, metric).values
    return float((values[1:] if values.size > 1 else values).mean()) if values.size else None
