"""Metrics of runs over rollouts, and the function that draws them.

Rollouts are counted instead of optimizer steps, so runs with different numbers of updates per
rollout are comparable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trl_qurl.lab.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = NDArray[np.float64]

FINAL_ROLLOUTS = 20
"""Number of rollouts to average for a final value, because single rollouts are noisy."""

STACKED = 2
"""Panels that a picture has in one column, at most."""

WIDTHS = (5.5, 8.0)
"""Inches of pictures with one and two columns."""

INK = "#7d7d7d"
"""Letters and axes: as readable on white as on a dark page, because pictures are transparent."""

# Okabe and Ito's colors without black and yellow, which one of the pages hides, and with a lighter
# blue. Dashes are for print and color-blind readers.
COLORS = (INK, "#D55E00", "#2187CC", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", ":", "-.")


STYLE = dict.fromkeys(
    ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"),
    INK,
) | {"font.size": "9", "axes.titlesize": "10", "axes.spines.top": "0", "axes.spines.right": "0"}


class Points(NamedTuple):
    """Values of a metric; both (N,), rollouts ascending."""

    rollouts: Values
    values: Values


class Panel(NamedTuple):
    """A part of a picture."""

    title: str
    unit: str  # of the y axis
    # By label: a run, or several, whose mean is drawn, over a band from the lowest to the highest.
    lines: Mapping[str, Sequence[Points]]
    logarithmic: bool = False
    x: str = "rollout"  # what the x axis counts
    dashed: Mapping[str, Sequence[Points]] = {}  # in the colors of `lines`; those become solid
    has_legend: bool = False  # next to it, because its lines differ from the first panel's
    limit: float | None = None  # a value to see the lines against


def points_of(run: Run, metric: str) -> Points:
    """Return a metric over rollouts.

    A row from within a rollout counts for that rollout.
    """
    updates = run.settings.get("updates_per_rollout") or 1
    logged = [(math.ceil(step / updates), value) for step, value in run.series(metric)]
    columns = np.array(logged, dtype=np.float64).reshape(-1, 2).T
    return Points(*columns)


def final_value(points: Points, window: int = FINAL_ROLLOUTS) -> float | None:
    """Average the metric over the last `window` rollouts, or the last half of a short run."""
    last = max(points.rollouts, default=0)
    values = points.values[points.rollouts > last - min(window, last / 2)]
    return float(values.mean()) if values.size else None


def smooth(points: Points) -> Points:
    """Average over five rollouts: each value with those of two on either side."""
    near = np.abs(points.rollouts[:, None] - points.rollouts) <= 2  # (N, N)
    return Points(points.rollouts, near @ points.values / near.sum(1))


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Draw panels in the format of the path's suffix.

    Up to two are stacked, so that a phone shows them in a readable size. More come in two columns,
    where an odd last one is as wide as two.
    """
    from matplotlib import rc_context

    with rc_context(STYLE):
        _draw(panels, path)


def _draw(panels: Sequence[Panel], path: Path) -> None:
    from matplotlib.figure import Figure

    columns = 1 if len(panels) <= STACKED else 2
    last = len(panels) - 1
    places = []
    for left in range(0, len(panels), columns):
        places.append([min(left + column, last) for column in range(columns)])
    height = 2.3 * len(places) + 0.22 * len(panels[0].lines)
    figure = Figure(figsize=(WIDTHS[columns - 1], height), layout="constrained")
    axes: dict[int, Axes] = figure.subplot_mosaic(places)
    for place, panel in enumerate(panels):
        _draw_panel(axes[place], panel)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", frameon=False, handlelength=3.2)
    figure.savefig(path, dpi=120, transparent=True)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for number, (label, runs) in enumerate(panel.lines.items()):
        color = COLORS[number % len(COLORS)]
        linestyle = "-" if panel.dashed else DASHES[number % len(DASHES)]
        if not panel.dashed:
            _draw_band(axes, runs, color)
        _draw_line(axes, runs, color, linestyle, label)
        _draw_line(axes, panel.dashed.get(label, ()), color, "--", "")
    if panel.limit is not None:
        axes.axhline(panel.limit, color=INK, linewidth=1, linestyle=(0, (1, 2)))
    if panel.has_legend:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, handlelength=1)
    axes.set_title(panel.title, loc="left", fontweight="bold")
    axes.set(xlabel=panel.x, ylabel=panel.unit)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.locator_params(axis="x", integer=True)
    if panel.logarithmic:
        axes.set_yscale("log", subs=(2, 5))
        low, high = axes.get_ylim()
        if high > 1e5 * low:  # the labels in between would overlap
            axes.minorticks_off()
    axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")


def _on_one_axis(runs: Sequence[Points]) -> tuple[Values, Values]:
    """Return the rollouts of the first run, (N,), and the smoothed values of all, (runs, N)."""
    lines = [smooth(points) for points in runs if points.values.size]
    if not lines:  # the metric of another trainer
        return np.empty(0), np.empty((0, 0))
    rollouts = lines[0].rollouts
    return rollouts, np.array([np.interp(rollouts, *line) for line in lines])


def _draw_band(axes: Axes, runs: Sequence[Points], color: str) -> None:
    rollouts, values = _on_one_axis(runs)
    if len(values) > 1:
        low, high = values.min(0), values.max(0)
        axes.fill_between(rollouts, low, high, color=color, alpha=0.15, linewidth=0)


def _draw_line(axes: Axes, runs: Sequence[Points], color: str, linestyle: str, label: str) -> None:
    rollouts, values = _on_one_axis(runs)
    if not values.size:
        return
    axes.plot(
        rollouts,
        values.mean(0),
        color=color,
        linestyle=linestyle,
        marker="" if len(rollouts) > 1 else "o",  # a point makes no line
        label=label,
    )
