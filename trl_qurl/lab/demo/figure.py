"""The picture of a run: did the policy learn, did the actor stay close, what was clipped, what did rounding cost."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from trl_qurl.lab.demo.record import Row


class Curve(NamedTuple):
    """One line of a panel: the metric, its label in the legend and its colour (colour-blind safe, Okabe and Ito)."""

    metric: str
    label: str
    color: str
    compared: bool = False  # also drawn for the runs that a picture compares with


class Panel(NamedTuple):
    """One of the four plots."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    logarithmic: bool = False
    percent: bool = False
    whole_share: bool = False  # the axis always runs from 0 to 1
    at_least: float | None = None  # the axis starts here, whatever lies below


FEW_POINTS = 20  # below which they are marked: a line through one point cannot be seen
ROOM_FOR_LEGEND = 1.3  # height of a panel over that of its curves; on a logarithmic axis, of their exponents

BLUE, ORANGE, GREEN, RED, GRAY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#555555"

LEARNING = Panel(
    "Does the policy learn?",
    "share of problems",
    (
        Curve("reward", "rollout reward of the actor, sampled", ORANGE),
        Curve("expected_accuracy", "policy, expected (held out)", BLUE, compared=True),
        Curve("greedy_accuracy", "policy, greedy (held out)", GREEN),
    ),
    whole_share=True,
)
MISMATCH = Panel(
    "How far is the actor from the policy?",
    "KL(behaviour ‖ proximal), nats per token",
    (Curve("mismatch/kl_k3", "k3 estimator", RED, compared=True),),
    logarithmic=True,
)
GRPO_PANELS = (
    LEARNING,
    MISMATCH,
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
PPO_PANELS = (
    LEARNING,
    MISMATCH,
    Panel(
        "How much is clipped?",
        "share of tokens",
        (
            Curve("clip_ratio/region_mean", "importance ratio beyond the clip range", BLUE),
            Curve("critic/value_clip_share", "value beyond its clip range", GREEN),
            Curve("mismatch/capped_share", "mismatch ratio ρ above the cap C", ORANGE),
        ),
        percent=True,
    ),
    Panel(
        "Does the critic know what to expect?",
        "share of the returns' variance",
        (Curve("critic/explained_variance", "explained by the critic", BLUE, compared=True),),
        at_least=-0.5,
    ),
)
PANELS = {"grpo": GRPO_PANELS, "ppo": PPO_PANELS}


def draw_figure(runs: dict[str, list[Row]], path: Path, algorithm: str = "grpo") -> None:
    """Draw the four panels from one row per rollout and write them as PNG; metrics never logged leave a note.

    Args:
        runs: by the number format of their rollouts, one mapping per rollout with `rollout` and the metrics; a missing
            or `None` metric is a gap. The first run is drawn in full; of the others, what is to be compared, dashed.
        path: file to write.
        algorithm: which panels, a key of `PANELS`.
    """
    # The object-oriented interface draws without a display and does not change matplotlib's global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    actor = next(iter(runs))
    title = f"Three-digit addition: {algorithm.upper()} with {actor} rollouts and a full-precision policy"
    figure.suptitle(title, fontsize=14)
    for axes, panel in zip(figure.subplots(2, 2, sharex=True).flat, PANELS[algorithm], strict=True):
        draw_panel(axes, panel, runs)
    for axes in figure.axes[2:]:
        axes.set_xlabel("rollout (256 completions, four updates)")
    figure.savefig(path, dpi=150)


def draw_panel(axes: Axes, panel: Panel, runs: dict[str, list[Row]]) -> None:
    """Draw the curves of one panel with its title, scale and legend."""
    from matplotlib.ticker import PercentFormatter

    (_, rows), *others = runs.items()
    drawn = [curve for curve in panel.curves if draw_curve(axes, curve, rows, positive_only=panel.logarithmic)]
    for name, other_rows in others:
        for curve in panel.curves:
            if curve.compared:
                dashed = curve._replace(label=f"{curve.label}, {name} rollouts", color=GRAY)
                draw_curve(axes, dashed, other_rows, positive_only=panel.logarithmic, style="--")
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
    elif panel.at_least is not None:
        axes.set_ylim(max(panel.at_least, axes.get_ylim()[0]), 1)
        axes.axhline(0, color="black", linewidth=0.6)
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


def draw_curve(axes: Axes, curve: Curve, rows: list[Row], positive_only: bool, style: str = "-") -> bool:
    """Draw one metric where it was logged; returns whether there was anything to draw."""
    points = [(row["rollout"], row[curve.metric]) for row in rows if row.get(curve.metric) is not None]
    points = [(rollout, value) for rollout, value in points if value > 0 or not positive_only]
    if points:
        marker = "o" if len(points) < FEW_POINTS else None
        x, y = zip(*points, strict=True)
        axes.plot(x, y, style, label=curve.label, color=curve.color, linewidth=1.6, marker=marker)
    return bool(points)
