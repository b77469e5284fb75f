"""From questions and groups to plots: which lines go into which picture, on which scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trl_qurl.lab.report.curves import Curve, Points, across_seeds, points_of, rollouts_of, smooth, smoothing_window
from trl_qurl.lab.report.groups import Facet, Group
from trl_qurl.lab.report.questions import Measure, Panel, Question

MOST_WITH_RAW = 2
"""Lines in a plot behind which there is room for the values before smoothing."""

LEAST_DECADES = 0.35
"""Height of a logarithmic axis, so that some tick falls into it."""


class Line(NamedTuple):
    """One line of a plot: smoothed mean and range over seeds; `raw` is what a single seed logged."""

    label: str
    style: int
    curve: Curve
    seeds: int
    raw: Points | None


class Plot(NamedTuple):
    """One picture; `name` is its file's, `limits` are those of the vertical axis, `end` that of the horizontal one."""

    name: str
    title: str
    panel: Panel
    lines: tuple[Line, ...]
    limits: tuple[float, float]
    window: int
    end: float


class Curves:
    """The smoothed curves of all groups, each made once.

    Args:
        groups: whose runs have rows.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.end = max(1.0, *(rollouts_of(run) for group in groups for run in group.runs))
        self.window = smoothing_window(self.end)
        self._made: dict[tuple[int, str], tuple[Curve, int, Points | None]] = {}  # by group and metric

    def line(self, group: Group, measure: Measure, panel: Panel, label: str, style: int) -> Line | None:
        """A group's line, if it logged anything that the panel can show."""
        key = (id(group), measure.metric)
        if key not in self._made:
            self._made[key] = self._make(group, measure.metric, panel.largest)
        curve, seeds, raw = self._made[key]
        if panel.logarithmic:
            curve = Curve(*(values[curve.mean > 0] for values in curve))
        return Line(label, style, curve, seeds, raw) if curve.mean.size else None

    def _make(self, group: Group, metric: str, largest: bool) -> tuple[Curve, int, Points | None]:
        points = [points_of(run, metric) for run in group.runs]
        logged = [seed for seed in points if seed.values.size]
        curve = across_seeds([smooth(seed, self.window, largest) for seed in logged])
        return curve, len(logged), logged[0] if len(logged) == 1 and self.window > 1 else None


def plots_of(question: Question, facets: Sequence[Facet], curves: Curves) -> list[Plot]:
    """The plots that answer a question; none where nothing was logged."""
    plots = [plot for panel in question.panels for plot in _panel_plots(question.name, panel, facets, curves)]
    if question.one_scale:
        return _on_one_scale(plots)
    return plots


def _panel_plots(name: str, panel: Panel, facets: Sequence[Facet], curves: Curves) -> list[Plot]:
    """One plot of all measures if there is one group; else for every measure one per facet, on the same scale."""
    groups = [entry.group for facet in facets for entry in facet.entries]
    if len(groups) == 1:
        drawn = [
            curves.line(groups[0], measure, panel, measure.label, style)
            for style, measure in enumerate(panel.measures)
        ]
        lines = [line for line in drawn if line is not None]
        title = lines[0].label if len(lines) == 1 else panel.title
        return _on_one_scale([_plot(f"{name} {panel.title}", title, panel, lines, curves)] if lines else [])
    return [
        plot
        for measure in panel.measures
        for plot in _on_one_scale(_facet_plots(name, measure, panel, facets, curves))
    ]


def _facet_plots(name: str, measure: Measure, panel: Panel, facets: Sequence[Facet], curves: Curves) -> list[Plot]:
    plots = []
    for facet in facets:
        drawn = [curves.line(entry.group, measure, panel, entry.label, entry.style) for entry in facet.entries]
        lines = [line for line in drawn if line is not None]
        title = f"{measure.label}: {facet.title}" if facet.title else measure.label
        if lines:
            plots.append(_plot(f"{name} {measure.metric} {facet.title}", title, panel, lines, curves))
    return plots


def _plot(name: str, title: str, panel: Panel, lines: Sequence[Line], curves: Curves) -> Plot:
    """A plot that still lacks the limits of its vertical axis."""
    if len(lines) > MOST_WITH_RAW:
        lines = [line._replace(raw=None) for line in lines]
    return Plot(name, title, panel, tuple(lines), (math.nan, math.nan), curves.window, curves.end)


def _on_one_scale(plots: Sequence[Plot]) -> list[Plot]:
    """The same plots with one vertical axis for all, which must be of the same kind."""
    if not plots:
        return []
    limits = limits_of([line for plot in plots for line in plot.lines], plots[0].panel)
    return [plot._replace(limits=limits) for plot in plots]


def limits_of(lines: Sequence[Line], panel: Panel) -> tuple[float, float]:
    """The vertical axis: what is drawn and a little room; at least some height where all values are the same."""
    drawn = [values for line in lines for values in (line.curve.low, line.curve.high)]
    drawn += [line.raw.values for line in lines if line.raw is not None]
    if panel.logarithmic:
        positive = [values[values > 0] for values in drawn]
        low, high = min(map(_lowest, positive)), max(map(_highest, positive))
        span = math.log10(high / low)
        room = max(0.05 * span, (LEAST_DECADES - span) / 2)
        return low * 10**-room, high * 10**room
    low, high = min(map(_lowest, drawn)), max(map(_highest, drawn))
    if panel.from_zero:
        low = min(low, 0.0)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 0.05
    lowest = low if panel.from_zero and low == 0 else low - room
    if panel.at_least is not None:
        lowest = max(lowest, panel.at_least)
    return lowest, max(high + room, lowest + room)


def _lowest(values: Iterable[float]) -> float:
    return min(values, default=math.inf)


def _highest(values: Iterable[float]) -> float:
    return max(values, default=-math.inf)
