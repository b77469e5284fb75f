"""Matplotlib figures: line plots of metrics over rollouts, and bars of the seconds per rollout.

Besides colors, lines have different dashes and markers, for print and for color-blind readers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

from trl_qurl.lab.report.curves import (
    TIMES,
    Curve,
    Points,
    across_seeds,
    mean_seconds,
    points_of,
    rollouts_of,
    smooth,
    smoothing_window,
)
from trl_qurl.lab.report.groups import Group, parts_of
from trl_qurl.lab.report.questions import Measure, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colors, except for yellow: it is too light for a line.
COLORS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "X", "P", "*")
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
HATCHES = ("", "xxxx", "////", "....", "\\\\\\\\", "||||", "----", "")
BAR_COLORS = ("#0072B2", "#D55E00", "#E69F00", "#CC79A7", "#56B4E9", "#999999", "#009E73", "#FFFFFF")

PANEL_WIDTH, PANEL_HEIGHT, LEGEND_ROW = 4.2, 2.7, 0.22  # inches


class Line(NamedTuple):
    """One line of a plot."""

    label: str
    style: int
    curve: Curve
    raw: Points | None  # unsmoothed values, if there is only one seed


class Plot(NamedTuple):
    """One set of axes."""

    title: str
    panel: Panel
    lines: list[Line]


def plots_of(panels: Sequence[Panel], groups: Sequence[Group], window: int) -> list[Plot]:
    """Choose the lines of each plot: one group shares a plot for all measures; several groups, one per measure."""
    plots = []
    for panel in panels:
        if len(groups) == 1:
            lines = _lines([(measure.label, groups[0], measure) for measure in panel.measures], panel, window)
            plots.append(Plot(lines[0].label if len(lines) == 1 else panel.title, panel, lines))
        else:
            for measure in panel.measures:
                pairs = [(_seeded(group, groups), group, measure) for group in groups]
                plots.append(Plot(measure.label, panel, _lines(pairs, panel, window)))
    return [plot for plot in plots if plot.lines]


def draw_lines(panels: Sequence[Panel], groups: Sequence[Group], columns: int = 2) -> list[tuple[Figure, str]]:
    """Draw the logged metrics over rollouts: one figure with a description per part of the groups."""
    end = max(rollouts_of(run) for group in groups for run in group.runs)
    window = smoothing_window(end)
    figures = []
    for part in parts_of(groups):
        plots = plots_of(panels, part, window)
        if not plots:
            continue
        handles: dict[str, Any] = {}
        first: dict[Panel, Axes] = {}
        columns_used, rows = min(columns, len(plots)), -(-len(plots) // columns)
        figure = _new_figure(columns_used, rows * PANEL_HEIGHT + (len(part) > 1) * len(part) * LEGEND_ROW)
        for index, (title, panel, lines) in enumerate(plots):
            axes = figure.add_subplot(rows, columns_used, index + 1, sharey=first.get(panel))
            first.setdefault(panel, axes)
            line_handles = {line.label: _draw_line(axes, line) for line in lines}
            handles |= line_handles
            _label_axes(axes, title, "rollout", panel.unit)
            if len(part) == 1 and len(lines) > 1:
                axes.legend(line_handles.values(), line_handles, fontsize=8, frameon=False)
        for axes, plot in zip(figure.axes, plots, strict=True):  # only once all lines on shared axes are drawn
            _set_scale(axes, plot.panel, end)
        if len(part) > 1:
            _add_legend(figure, handles)
        figures.append((figure, " ".join(_describe(plot) for plot in plots)))
    return figures


def draw_seconds(groups: Sequence[Group]) -> list[tuple[Figure, str]]:
    """Draw the mean seconds per rollout as stacked bars, one per group that logged times."""
    bars = [(group.label, seconds) for group in groups if (seconds := mean_seconds(group.runs))]
    if not bars:
        return []
    figure = _new_figure(2, 1.2 + 0.4 * len(bars) + 2 * LEGEND_ROW)
    axes = figure.add_subplot()
    handles: dict[str, Any] = {}
    lefts = [0.0] * len(bars)
    for part, color, hatch in zip(TIMES, BAR_COLORS, HATCHES, strict=True):
        widths = [seconds.get(part, 0.0) for _, seconds in bars]
        if any(part in seconds for _, seconds in bars):
            look: dict[str, Any] = {"color": color, "hatch": hatch, "edgecolor": "black", "linewidth": 0.5}
            handles[part] = axes.barh(range(len(bars)), widths, left=lefts, **look)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for row, total in enumerate(lefts):
        axes.text(total, row, f" {total:.3g} s", va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], parse_math=False)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    _label_axes(axes, "Seconds per rollout, including its updates", "seconds", "")
    _add_legend(figure, handles, columns=4)
    texts = [f"{label} {', '.join(f'{part} {value:.3g} s' for part, value in parts.items())}" for label, parts in bars]
    return [(figure, f"Stacked bars, seconds per rollout. {'; '.join(texts)}.")]


def to_png(figure: Figure) -> bytes:
    """Render a figure as PNG; the same runs give the same bytes."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def _lines(pairs: Sequence[tuple[str, Group, Measure]], panel: Panel, window: int) -> list[Line]:
    """Build the lines that have values for the panel; a line's style depends only on its position."""
    lines = []
    for style, (label, group, measure) in enumerate(pairs):
        logged = [points for run in group.runs if (points := points_of(run, measure.metric)).values.size]
        curve = across_seeds([smooth(points, window, panel.largest) for points in logged])
        if panel.log:
            curve = Curve(*(values[curve.mean > 0] for values in curve))
        raw = logged[0] if len(logged) == 1 and len(pairs) <= 2 and window > 1 else None
        if curve.mean.size:
            lines.append(Line(label, style, curve, raw))
    return lines


def _seeded(group: Group, groups: Sequence[Group]) -> str:
    """Return a group's label, with its number of seeds if any group has several."""
    if all(len(other.runs) == 1 for other in groups):
        return group.label
    return f"{group.label} ({len(group.runs)} seed{'s' if len(group.runs) > 1 else ''})"


def _new_figure(columns: int, height: float) -> Figure:
    # The object-oriented interface draws without a display and does not change matplotlib's global state.
    from matplotlib.figure import Figure

    return Figure(figsize=(columns * PANEL_WIDTH, height), layout="constrained")


def _draw_line(axes: Axes, line: Line) -> Any:
    """Draw a line with a band over seeds, or with the unsmoothed values behind it."""
    color, marker = COLORS[line.style % len(COLORS)], MARKERS[line.style % len(MARKERS)]
    rollouts, mean, low, high = line.curve
    if line.raw is not None:
        axes.plot(*line.raw, color=color, alpha=0.3, linewidth=0.7)
    if (low < high).any():
        axes.fill_between(rollouts, low, high, color=color, alpha=0.13, linewidth=0)
    # Mark all points if there are few. Otherwise offset the marks by style to tell overlapping lines apart.
    every = (line.style * 0.15 / len(MARKERS), 0.15) if len(mean) > 20 else None
    look: dict[str, Any] = {"color": color, "linestyle": DASHES[line.style % len(DASHES)], "linewidth": 1.6}
    (handle,) = axes.plot(rollouts, mean, **look, marker=marker, markersize=4, markevery=every)
    return handle


def _label_axes(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold").set_parse_math(False)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _set_scale(axes: Axes, panel: Panel, end: float) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.set_xlim(0, end * 1.02)
    if panel.log:
        axes.set_yscale("log")
    if panel.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    if panel.from_zero:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]) if axes.dataLim.y0 < 0 else 0.0)
    if panel.at_least is not None:
        axes.set_ylim(bottom=max(panel.at_least, axes.get_ylim()[0]))


def _add_legend(figure: Figure, handles: Mapping[str, Any], columns: int = 1) -> None:
    legend = figure.legend(
        handles.values(), handles, loc="outside lower left", ncols=columns, fontsize=9, frameon=False, handlelength=3.2
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # settings may contain dollar signs, which would start a formula


def _describe(plot: Plot) -> str:
    """Describe a plot for readers who cannot see it."""
    scale, unit = (100, " %") if plot.panel.percent else (1, "")
    ends = "; ".join(f"{line.label} {scale * float(line.curve.mean[-1]):.3g}{unit}" for line in plot.lines)
    return f"Lines over rollouts, {plot.title} ({plot.panel.unit}). At the end: {ends}."
