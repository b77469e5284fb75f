"""Metrics of runs over rollouts, and how they are drawn.

Rollouts are counted instead of optimizer steps, so runs with different numbers of updates per rollout are comparable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trl_qurl.trainers.run_log import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def smooth(points: Points, window: int, combine: Callable[[Values], Any] = np.mean) -> Points:
    """Combine each value with those within (window − 1) / 2 rollouts; fewer near the ends."""
    reach = (window - 1) / 2
    starts = np.searchsorted(points.rollouts, points.rollouts - reach, side="left")
    ends = np.searchsorted(points.rollouts, points.rollouts + reach, side="right")
    smoothed = [combine(points.values[start:end]) for start, end in zip(starts, ends, strict=True)]
    return Points(points.rollouts, np.array(smoothed, dtype=np.float64))


def draw_curve(axes: Axes, style: int, label: str, seeds: Sequence[Run], metric: str) -> None:
    """Draw a metric over rollouts, if it was logged: the mean over seeds with their range.

    Each seed is smoothed over 1/20 of the rollouts, by the maximum if the metric is one itself (`..._max`).

    Args:
        axes: Where to draw.
        style: Position of the line among those of the axes.
        label: Name of the line in the legend.
        seeds: Runs with the same settings.
        metric: Name of the metric.
    """
    logged = [points for run in seeds if (points := points_of(run, metric)).values.size]
    if not logged:
        return
    window = int(max(points.rollouts[-1] for points in logged) / 20) // 2 * 2 + 1
    smoothed = [smooth(points, window, np.max if metric.endswith("_max") else np.mean) for points in logged]
    rollouts = np.unique(np.concatenate([points.rollouts for points in smoothed]))
    # (seeds, N), NaN before a seed's first value and after its last
    values = np.stack([np.interp(rollouts, *points, left=math.nan, right=math.nan) for points in smoothed])
    color, marker = COLORS[style % len(COLORS)], "o" if len(rollouts) <= 20 else ""  # few points may make no line
    look: dict[str, Any] = {"color": color, "linestyle": DASHES[style % len(DASHES)], "linewidth": 1.6}
    mean = np.nanmean(values, axis=0)
    axes.plot(rollouts, mean, **look, label=label, marker=marker, markersize=4)
    axes.set_xlabel("rollout", fontsize=9)
    axes.locator_params(axis="x", integer=True)
    if len(logged) > 1:
        low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
        axes.fill_between(rollouts, low, high, color=color, alpha=0.13, linewidth=0)


def finish_axes(axes: Axes, title: str, unit: str = "", log: bool = False) -> None:
    """Add title, unit and grid; a logarithmic vertical axis leaves out values that are not positive."""
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_ylabel(unit, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if log:
        axes.set_yscale("log", nonpositive="mask")
