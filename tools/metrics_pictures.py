"""Draw the figure of docs/metrics.md from logs in the repository: python tools/metrics_pictures.py

It shows one healthy run and two sick ones from the study. Their final figures are printed in the
form of the page's table, and tests/test_documentation.py compares the two.
"""

from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from trl_qurl.lab.curves import final_value, points_of, smooth
from trl_qurl.lab.runs import read_run

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "benchmarks" / "objectives" / "runs" / "main"
PICTURE = ROOT / "docs" / "images" / "metrics-healthy-and-sick.png"
WINDOW = 9  # rollouts


class Shown(NamedTuple):
    """A run, and the style of its lines, in colors by Okabe and Ito."""

    file: str
    label: str
    color: str
    dashes: str


class Panel(NamedTuple):
    """A metric, and how it is drawn and printed."""

    metric: str
    title: str
    logarithmic: bool
    printed: str


SHOWN = (
    Shown("int8_acr-seed2", "INT8, acr: healthy", "#0072B2", "-"),
    Shown("int3_naive-seed2", "INT3, naive: sick behind a good reward", "#E69F00", "--"),
    Shown("int3_quantized_ratio-seed2", "INT3, quantized_ratio: collapses", "#D55E00", "-."),
)
PANELS = (
    Panel("reward", "reward (the quantized actor's)", False, ".2f"),
    Panel("expected_accuracy", "accuracy of the policy", False, ".2f"),
    Panel("mismatch/kl_k3", "mismatch/kl_k3", True, ".2g"),
    Panel("mismatch/ratio_max", "mismatch/ratio_max", True, ".1f"),
    Panel("policy/approx_kl", "policy/approx_kl", True, ".2g"),
    Panel("clip_ratio/region_mean", "clip_ratio/region_mean", False, ".2g"),
)


def figures() -> dict[str, list[str]]:
    """By metric, each run's mean over its last 20 rollouts as the page prints it."""
    runs = [read_run(RUNS / f"{shown.file}.jsonl.gz") for shown in SHOWN]
    printed = {}
    for panel in PANELS:
        values = [final_value(points_of(run, panel.metric)) or 0.0 for run in runs]
        printed[panel.metric] = [format(value, panel.printed) for value in values]
    return printed


def draw() -> Figure:
    """Six panels in two columns, readable on a phone."""
    figure = Figure(figsize=(6.0, 7.4), dpi=160, layout="constrained")
    all_axes = figure.subplots(3, 2).ravel()
    for axes, panel in zip(all_axes, PANELS, strict=True):
        for shown in SHOWN:
            points = points_of(read_run(RUNS / f"{shown.file}.jsonl.gz"), panel.metric)
            line = smooth(points, WINDOW)
            color = shown.color
            axes.plot(*points, color=color, alpha=0.25, linewidth=0.7)
            axes.plot(*line, shown.dashes, color=color, linewidth=1.8, label=shown.label)
        axes.set_title(panel.title, fontsize=11, loc="left")
        axes.set_xlabel("rollout", fontsize=10)
        axes.tick_params(labelsize=10)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if panel.logarithmic:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=10.5, frameon=False)
    return figure


if __name__ == "__main__":
    for metric, values in figures().items():
        print(metric, *values, sep=" | ")
    draw().savefig(PICTURE)
    print(PICTURE)
