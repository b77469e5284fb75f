"""Plot of a mismatch report: the distribution of ρ, and effective sample size by answer length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trl_qurl.lab.curves import COLORS, DASHES, MARKERS
from trl_qurl.lab.formats import label
from trl_qurl.lab.mismatch.run import Report
from trl_qurl.lab.mismatch.statistics import CAP

BINS = 81
LONGEST = 1e5  # tokens


def draw_mismatch(report: Report, log_ratios: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw both panels and save them as PNG."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    widest = max(0.05, *(float(np.quantile(np.abs(values), 0.999)) for values in log_ratios.values()))
    edges = np.linspace(-widest, widest, BINS + 1)
    for style, (name, mismatch) in enumerate(report.formats.items()):
        look = {"color": COLORS[style % len(COLORS)], "linestyle": DASHES[style % len(DASHES)], "label": label(name)}
        counts, _ = np.histogram(np.clip(log_ratios[name], -widest, widest), edges)
        left.stairs(counts / counts.sum(), edges, **look, linewidth=1.5)
        if mismatch.half_length is not None:
            lengths = np.logspace(0, np.log10(LONGEST))
            right.plot(lengths, 0.5 ** (lengths / mismatch.half_length), **look, linewidth=1.2)
            marks = {"color": look["color"], "marker": MARKERS[style % len(MARKERS)], "linestyle": "none"}
            right.plot(*zip(*mismatch.sequence_ess.items(), strict=True), **marks, markersize=5)
    if widest > np.log(CAP):
        left.axvline(np.log(CAP), color="gray", linewidth=0.8)
        left.annotate("C", (np.log(CAP), 1.0), xycoords=("data", "axes fraction"), va="top", color="gray")
    left.set(yscale="log", xlabel="log ρ of a token (policy over engine)", ylabel="share of tokens")
    left.locator_params(axis="x", nbins=6)
    left.set_title("How far apart are engine and policy?", loc="left", fontsize=10, fontweight="bold")
    right.set(
        xscale="log",
        ylim=(0, 1.02),
        xlabel="tokens of an answer (points: measured)",
        ylabel="effective sample size, share",
    )
    right.set_title("How much do sequence weights still count?", loc="left", fontsize=10, fontweight="bold")
    right.xaxis.set_major_formatter("{x:.0f}")
    for axes in (left, right):
        axes.grid(alpha=0.3, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    right.legend(fontsize=9, frameon=False, loc="lower left")
    figure.savefig(path, dpi=150)
