"""Seconds of a rollout as stacked bars, one per group, hatched for print."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from trl_qurl.lab.report.groups import Facet
from trl_qurl.lab.report.numerals import numeral, tick, with_error
from trl_qurl.lab.report.pictures import (
    LABEL_CHARACTERS,
    STEPS,
    TEXT_SIZE,
    add_legend,
    legend_columns,
    legend_height,
    new_figure,
)
from trl_qurl.lab.report.seconds import PARTS, mean_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAR_HEIGHT, LINE_HEIGHT, GAP = 0.19, 0.19, 0.08
"""Inches of a bar, of a line of its name above it, and to the next name."""

ROOM_FOR_TOTAL = 1.25

FILLS = {
    "generation": ("#0072B2", ""),
    "gathering, rounding": ("#D55E00", "xxxx"),
    "sending": ("#E69F00", "////"),
    "checks": ("#CC79A7", "...."),
    "log-probabilities": ("#56B4E9", "\\\\\\\\"),
    "values": ("#999999", "||||"),
    "updates": ("#009E73", "----"),
    "other": ("#FFFFFF", ""),
}
"""Colour and hatching of each part."""


class Bars(NamedTuple):
    """One picture: a bar per label, as its seconds by part; `end` is the longest bar of all pictures."""

    title: str
    labels: list[str]
    seconds: list[dict[str, float]]
    end: float

    @property
    def parts(self) -> list[str]:
        """The parts that any bar has."""
        return [part for part in PARTS if any(part in bar for bar in self.seconds)]


def bars_of(facets: Sequence[Facet]) -> list[Bars]:
    """One picture per facet with the groups whose times were logged."""
    split = [[(entry.label, mean_seconds(entry.group.runs)) for entry in facet.entries] for facet in facets]
    end = max((sum(seconds.values()) for bars in split for _, seconds in bars), default=0.0)
    pictures = []
    for facet, bars in zip(facets, split, strict=True):
        logged = [(label, seconds) for label, seconds in bars if seconds]
        if logged:
            labels, seconds = zip(*logged, strict=True)
            title = f"Seconds of a rollout: {facet.title}" if facet.title else "Seconds of a rollout"
            pictures.append(Bars(title, list(labels), list(seconds), end))
    return pictures


def draw_bars(bars: Bars) -> Figure:
    """The picture; its vertical axis is in inches, from the top."""
    columns = legend_columns(bars.parts)
    labels = [textwrap.fill(label, LABEL_CHARACTERS) for label in bars.labels]
    name_height = LINE_HEIGHT * max(label.count("\n") + 1 for label in labels)
    row_height = name_height + BAR_HEIGHT + GAP
    centers = [row * row_height + name_height + BAR_HEIGHT / 2 for row in range(len(labels))]
    height = row_height * len(labels)
    unit = "mean, with the updates made from it"
    figure, axes = new_figure(bars.title, unit, height, legend_height(bars.parts, columns), left=0.2)
    axes.set_ylim(height, 0)
    handles = [draw_part(axes, bars, part, centers) for part in bars.parts]
    for center, label, seconds in zip(centers, labels, bars.seconds, strict=True):
        total = sum(seconds.values())
        axes.text(0, center - 0.6 * BAR_HEIGHT, label, fontsize=TEXT_SIZE, va="bottom", parse_math=False)
        axes.text(total, center, f" {with_error(total, None)} s", fontsize=TEXT_SIZE, va="center")
    set_axes(axes, bars.end)
    add_legend(figure, handles, bars.parts, columns)
    return figure


def draw_part(axes: Axes, bars: Bars, part: str, centers: Sequence[float]) -> object:
    """One part of all bars, beginning where the parts before it end; returns what stands for it in the legend."""
    before = bars.parts[: bars.parts.index(part)]
    lefts = [sum(seconds.get(earlier, 0.0) for earlier in before) for seconds in bars.seconds]
    widths = [seconds.get(part, 0.0) for seconds in bars.seconds]
    color, hatch = FILLS[part]
    return axes.barh(centers, widths, BAR_HEIGHT, lefts, color=color, hatch=hatch, edgecolor="black", linewidth=0.5)


def set_axes(axes: Axes, end: float) -> None:
    """No vertical axis, and room for the totals on the right."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlim(0, end * ROOM_FOR_TOTAL)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    axes.set_xlabel("seconds", fontsize=TEXT_SIZE, labelpad=2)


def describe_bars(bars: Bars) -> str:
    """What the picture shows, for who cannot see it."""
    texts = [
        f"{label} " + ", ".join(f"{part} {numeral(value)} s" for part, value in seconds.items())
        for label, seconds in zip(bars.labels, bars.seconds, strict=True)
    ]
    return f"Stacked bars, {bars.title}. {'; '.join(texts)}."
