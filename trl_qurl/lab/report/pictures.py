"""Plots as pictures: one plot each, as wide as a phone's screen, with the legend below it.

Every size is fixed beforehand, in inches, instead of being found by trying: a report has dozens of pictures, and the
same ones look the same in every report. Lines differ in dashes and markers besides their colour, for print.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

from trl_qurl.lab.report.numerals import LARGEST, SMALLEST, numeral, percentage, tick
from trl_qurl.lab.report.plots import Line, Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# In inches, and text in points: the page shows a picture about 380 pixels wide, and so its text about 14 pixels high.
WIDTH, PLOT_HEIGHT = 4.0, 2.3
LEFT, RIGHT, BOTTOM = 0.68, 0.14, 0.5
ROW, FURTHER_LINE = 0.18, 0.2  # of a legend

DPI = 200
TITLE_SIZE, TEXT_SIZE = 11, 10.5
TITLE_CHARACTERS, LABEL_CHARACTERS = 38, 38

FEW_POINTS = 20
"""Up to which every point is marked: where a metric is logged rarely, the line between is no measurement."""

MARKED = 7
"""Markers on a longer line, which are there to tell it from others."""

# Okabe and Ito's colours, colour-blind safe, without their yellow, which is too light for a line. As 7, 8 and 5 have
# no common factor, it takes 280 lines until one looks like another.
COLORS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "X", "P", "*")
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (3, 1, 1, 1, 1, 1)))

STEPS = (1, 2, 2.5, 5, 10)
"""From tick to tick."""


def new_figure(title: str, unit: str, plot_height: float, below: float, left: float = LEFT) -> tuple[Figure, Axes]:
    """A figure with a title, the unit below it, and so many inches for a legend at the bottom."""
    # The object-oriented interface draws without a display and does not change matplotlib's global state.
    from matplotlib.figure import Figure

    if len(title) > TITLE_CHARACTERS:  # what a facet is of comes after a colon
        title = "\n".join(textwrap.fill(part, TITLE_CHARACTERS) for part in title.split(": "))
    top = 0.24 * (title.count("\n") + 1) + 0.3
    bottom = BOTTOM + below
    height = top + plot_height + bottom
    figure = Figure(figsize=(WIDTH, height), dpi=DPI)
    axes = figure.add_axes(
        (left / WIDTH, bottom / height, (WIDTH - left - RIGHT) / WIDTH, plot_height / height),
    )
    heading = figure.text(0.02, 1 - 0.05 / height, title, va="top", fontsize=TITLE_SIZE, fontweight="bold")
    heading.set_parse_math(False)  # settings may hold dollar signs, which begin a formula
    figure.text(0.02, 1 - (top - 0.07) / height, unit, va="bottom", fontsize=TEXT_SIZE, color="#333333")
    axes.tick_params(labelsize=TEXT_SIZE)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_plot(plot: Plot) -> Figure:
    """The picture of a plot."""
    labels = [textwrap.fill(text, LABEL_CHARACTERS) for text in legend_labels(plot)]
    columns = legend_columns(labels)
    figure, axes = new_figure(plot.title, _unit(plot), PLOT_HEIGHT, legend_height(labels, columns))
    drawn = [draw_line(axes, line) for line in plot.lines]
    if plot.panel.logarithmic:
        axes.set_yscale("log")
    axes.set_ylim(*plot.limits)
    axes.set_xlim(0, plot.end * 1.02)
    axes.set_xlabel("rollout", fontsize=TEXT_SIZE, labelpad=2)
    set_ticks(axes, plot)
    if labels:
        add_legend(figure, drawn, labels, columns)
    return figure


def draw_line(axes: Axes, line: Line) -> Line2D:
    """A line with its band, or with the values before smoothing behind it; returned for the legend."""
    color = COLORS[line.style % len(COLORS)]
    rollouts, mean, low, high = line.curve
    if line.raw is not None:
        axes.plot(*line.raw, color=color, alpha=0.3, linewidth=0.7)
    if line.seeds > 1:
        axes.fill_between(rollouts, low, high, color=color, alpha=0.13, linewidth=0)
    every = max(1, round(len(mean) / MARKED))
    (drawn,) = axes.plot(
        rollouts,
        mean,
        linestyle=DASHES[line.style % len(DASHES)],
        color=color,
        linewidth=1.6,
        marker=MARKERS[line.style % len(MARKERS)],
        markersize=4.5,
        # Each style starts elsewhere, so that markers of lines that run together stay apart.
        markevery=1 if len(mean) <= FEW_POINTS else (line.style * every // len(MARKERS) % every, every),
    )
    return drawn


def set_ticks(axes: Axes, plot: Plot) -> None:
    """Few ticks, in plain numbers; on a logarithmic axis of little height also between the powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=STEPS))
    low, high = plot.limits
    if plot.panel.logarithmic:
        within = (1,) if high / low > 100 else (1, 2, 5) if high / low > 4 else range(1, 10)
        axes.yaxis.set_major_locator(LogLocator(subs=within, numticks=8))
        axes.yaxis.set_minor_formatter(NullFormatter())
        powers = low < SMALLEST or high > LARGEST
        write = FuncFormatter(lambda value, _: tick(value, powers))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
        percent = plot.panel.percent
        write = FuncFormatter(lambda value, _: f"{tick(round(100 * value, 9))} %" if percent else tick(value))
    axes.yaxis.set_major_formatter(write)


def legend_columns(labels: Sequence[str]) -> int:
    """Two where all labels are short enough."""
    widest = max((text_width(line) for text in labels for line in text.split("\n")), default=0.0)
    handle = 4.5 * TEXT_SIZE  # and the space around it
    return 2 if len(labels) > 1 and 2 * (widest + handle) < (WIDTH - 0.1) * 72 else 1


@lru_cache(maxsize=1000)
def text_width(text: str) -> float:
    """Width of a line of text in points, 72 of which are an inch."""
    from matplotlib.textpath import TextPath

    return TextPath((0, 0), text.replace("$", "S"), size=TEXT_SIZE).get_extents().width  # $ begins a formula


def legend_height(labels: Sequence[str], columns: int) -> float:
    """Inches that a legend takes, which is filled column by column, with the space above it; 0 without labels."""
    heights = [ROW + FURTHER_LINE * text.count("\n") for text in labels]
    per_column = -(-len(heights) // columns)
    filled = [sum(heights[start : start + per_column]) for start in range(0, len(heights), per_column or 1)]
    return max(filled) + 0.12 if filled else 0.0


def add_legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str], columns: int) -> None:
    """Below the plot, from the left edge."""
    legend = figure.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(0.0, 0.0),
        ncols=columns,
        fontsize=TEXT_SIZE,
        frameon=False,
        handlelength=3.2,
        handletextpad=0.5,
        columnspacing=1.0,
        labelspacing=0.25,
        borderaxespad=0.3,
        borderpad=0.1,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def to_png(figure: Figure) -> bytes:
    """The picture as a file with a palette, a third as large as without; the same runs give the same bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image  # a dependency of matplotlib's

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert("RGB")
    reduced = image.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    buffer = BytesIO()
    reduced.save(buffer, "PNG", dpi=(DPI, DPI))
    return buffer.getvalue()


def describe_plot(plot: Plot) -> str:
    """What the picture shows, for who cannot see it."""
    write = percentage if plot.panel.percent else numeral
    ends = [f"{line.label} {write(float(line.curve.mean[-1]))}" for line in plot.lines]
    return f"Lines over rollouts, {plot.title} ({_unit(plot)}). At the end: {'; '.join(ends)}."


def legend_labels(plot: Plot) -> list[str]:
    """The names of the lines, with their seeds if any has several; none where the title is the only line's name."""
    if all(line.seeds == 1 for line in plot.lines):
        labels = [line.label for line in plot.lines]
        return [] if labels == [plot.title] else labels
    return [f"{line.label} ({line.seeds} seed{'s' if line.seeds > 1 else ''})" for line in plot.lines]


def _unit(plot: Plot) -> str:
    if plot.window == 1:
        return plot.panel.unit
    kind = "largest" if plot.panel.largest else "mean"
    return f"{plot.panel.unit} · {kind} of {plot.window} rollouts"
