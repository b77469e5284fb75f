"""The picture of a run: did the policy learn, did the actor stay close, what was clipped, what did rounding cost."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Curve(NamedTuple):
    """One line of a panel: the metric, its label in the legend and its colour (colour-blind safe, Okabe and Ito)."""

    metric: str
    label: str
    color: str


class Panel(NamedTuple):
    """One of the four plots."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    logarithmic: bool = False
    percent: bool = False
    whole_share: bool = False  # the axis always runs from 0 to 1


FEW_POINTS = 20  # below which they are marked: a line through one point cannot be seen
ROOM_FOR_LEGEND = 1.3  # height of a panel over that of its curves; on a logarithmic axis, of their exponents

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"

PANELS = (
    Panel(
        "Does the policy learn?",
        "share of problems",
        (
            Curve("reward", "rollout reward of the actor, sampled", ORANGE),
            Curve("expected_accuracy", "policy, expected (held out)", BLUE),
            Curve("greedy_accuracy", "policy, greedy (held out)", GREEN),
        ),
        whole_share=True,
    ),
    Panel(
        "How far is the actor from the policy?",
        "KL(behaviour ‖ proximal), nats per token",
        (Curve("mismatch/kl_k3", "k3 estimator", RED),),
        logarithmic=True,
    ),
    Panel(
        "How much is clipped?",
        "share of tokens",
        (
            Curve("clip_ratio/region_mean", "importance ratio beyond the clip range", BLUE),
            Curve("mismatch/capped_share", "mismatch ratio ρ above the cap C", ORANGE),
        ),
        percent=True,
    ),
    Panel(
        "Do updates reach the rounded weights?",
        "share of the squared weight norm",
        (
            Curve("weights/normalized_update", "update per rollout (Eq. 13)", BLUE),
            Curve("weights/normalized_quantization_error", "quantization error (Eq. 14)", RED),
        ),
        logarithmic=True,
    ),
)


def draw_figure(rows: list[dict[str, Any]], path: Path, actor: str) -> None:
    """Draw the four panels from one row per rollout and write them as PNG; metrics never logged leave a note.

    Args:
        rows: one mapping per rollout with `rollout` and the metrics; a missing or `None` metric is a gap.
        path: file to write.
        actor: name of the rollouts' number format, for the title.
    """
    # The object-oriented interface draws without a display and does not change matplotlib's global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"Three-digit addition with {actor} rollouts and a full-precision policy", fontsize=14)
    for axes, panel in zip(figure.subplots(2, 2, sharex=True).flat, PANELS, strict=True):
        draw_panel(axes, panel, rows)
    for axes in figure.axes[2:]:
        axes.set_xlabel("rollout (256 completions, four updates)")
    figure.savefig(path, dpi=150)


def draw_panel(axes: Axes, panel: Panel, rows: list[dict[str, Any]]) -> None:
    """Draw the curves of one panel with its title, scale and legend."""
    from matplotlib.ticker import PercentFormatter

    drawn = [curve for curve in panel.curves if draw_curve(axes, curve, rows, positive_only=panel.logarithmic)]
    axes.set_title(panel.title, loc="left", fontweight="bold", fontsize=11)
    axes.set_ylabel(panel.unit)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if not drawn:
        axes.text(0.5, 0.5, "not logged in this run", transform=axes.transAxes, ha="center", color="gray")
        return
    if panel.logarithmic:
        axes.set_yscale("log")
    if panel.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    if panel.whole_share:
        axes.set_ylim(0, 1)
    else:
        leave_room_above(axes)
    axes.legend(frameon=False, fontsize=9, loc="lower right" if panel.whole_share else "upper left")


def leave_room_above(axes: Axes) -> None:
    """Stretch the vertical axis upwards, so that a legend in the upper left corner covers no curve.

    A logarithmic axis is first widened to whole decades: within one, matplotlib labels ticks such as 2 x 10^-4.
    """
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log":
        low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
        axes.set_ylim(low, low * (high / low) ** ROOM_FOR_LEGEND)
    else:
        axes.set_ylim(0, high * ROOM_FOR_LEGEND)


def draw_curve(axes: Axes, curve: Curve, rows: list[dict[str, Any]], positive_only: bool) -> bool:
    """Draw one metric where it was logged; returns whether there was anything to draw."""
    points = [(row["rollout"], row[curve.metric]) for row in rows if row.get(curve.metric) is not None]
    points = [(rollout, value) for rollout, value in points if value > 0 or not positive_only]
    if points:
        marker = "o" if len(points) < FEW_POINTS else None
        axes.plot(*zip(*points, strict=True), label=curve.label, color=curve.color, linewidth=1.6, marker=marker)
    return bool(points)
