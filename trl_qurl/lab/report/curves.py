"""A metric over rollouts: of one run, smoothed, of a group of seeds; its value at the end; and where the time goes.

The rollout is the unit of all reports: runs that make different numbers of optimizer updates with the tokens of one
rollout can then be compared. Between two logged values, a run is taken to be on the straight line that joins them.
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
"""What the seconds of a rollout are spent on, and the metric that each part is made of."""


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


def updates_per_rollout(run: Run) -> float:
    """Optimizer updates made with the tokens of one rollout; 1 where the run's settings do not say."""
    updates = run.settings.get("updates_per_rollout")
    return float(updates) if isinstance(updates, int | float) and updates > 0 else 1.0


def rollouts_of(run: Run) -> float:
    """Length of a run that has rows."""
    return max(row["step"] for row in run.rows) / updates_per_rollout(run)


def points_of(run: Run, metric: str) -> Points:
    """The metric over rollouts, which are steps where the settings do not say how many make a rollout."""
    updates = updates_per_rollout(run)
    logged = [(step / updates, value) for step, value in run.series(metric) if math.isfinite(value)]
    rollouts, values = np.array(logged, dtype=np.float64).reshape(-1, 2).T
    return Points(rollouts, values)


def smoothing_window(longest: float) -> int:
    """Rollouts over which curves are averaged, odd: a twentieth of the longest run; 1, so none, below 40 rollouts."""
    return 1 if longest < 40 else int(longest / 20) // 2 * 2 + 1


def smooth(points: Points, window: int, largest: bool = False) -> Points:
    """The mean, or the largest, of the values at most (window − 1) / 2 rollouts away; fewer at either end."""
    reach = (window - 1) / 2
    starts = np.searchsorted(points.rollouts, points.rollouts - reach, side="left")
    ends = np.searchsorted(points.rollouts, points.rollouts + reach, side="right")
    combine = np.max if largest else np.mean
    smoothed = [combine(points.values[start:end]) for start, end in zip(starts, ends, strict=True)]
    return Points(points.rollouts, np.array(smoothed, dtype=np.float64))


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


def final_value(points: Points, window: int = FINAL_ROLLOUTS) -> float | None:
    """Mean of the values of the last `window` rollouts in which the metric was logged."""
    if not points.values.size:
        return None
    return float(points.values[points.rollouts > points.rollouts[-1] - window].mean())


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and confidence interval (Student's t) of one value per seed; wider than it need be above 11 seeds."""
    if not values:
        return None
    mean = float(np.mean(values))
    if len(values) == 1:
        return Estimate(mean, None)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, STUDENT_T[min(len(values) - 1, len(STUDENT_T)) - 1] * error)


def seconds_per_rollout(run: Run) -> dict[str, float]:
    """Mean seconds of each part, of those that were logged; the first rollout, which warms up, is left out.

    Most metrics are logged once per rollout, `time/update_s` and `step_time` once per optimizer update. TRL's
    `step_time` contains the rollout, but neither the optimizer's own step nor a critic's update, so "other" is a lower
    bound.
    """
    updates = updates_per_rollout(run)
    seconds = {part: mean for part, metric in TIMES.items() if (mean := _mean(run, metric)) is not None}
    step = seconds.pop("other", None)
    if "sending" in seconds:
        seconds["sending"] = max(0.0, seconds["sending"] - seconds.get("gathering, rounding", 0.0))
    if "updates" in seconds:
        seconds["updates"] *= updates
    if step is not None and "updates" in seconds and "generation" in seconds:
        known = sum(seconds.values()) - updates * (_mean(run, "time/critic_update_s") or 0.0)
        seconds["other"] = max(0.0, updates * step - known)
    return seconds


def mean_seconds(runs: Sequence[Run]) -> dict[str, float]:
    """The mean over runs of each part that any of them logged."""
    splits = [seconds_per_rollout(run) for run in runs]
    logged = {part: [split[part] for split in splits if part in split] for part in TIMES}
    return {part: float(np.mean(values)) for part, values in logged.items() if values}


def _mean(run: Run, metric: str) -> float | None:
    values = points_of(run, metric).values
    return float((values[1:] if values.size > 1 else values).mean()) if values.size else None
