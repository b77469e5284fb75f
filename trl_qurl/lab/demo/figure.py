"""The demo's plot: did the policy learn, did the actor stay close, what was clipped, what did rounding cost."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from trl_qurl.lab.comparison import label
from trl_qurl.lab.curves import draw_curve, finish_axes
from trl_qurl.trainers.run_log import read_run


class Panel(NamedTuple):
    """One set of axes: the labels of its lines by metric."""

    title: str
    unit: str
    lines: dict[str, str]
    log: bool = False


LEARNING = Panel(
    "Does the policy learn?",
    "share of problems",
    {
        "expected_accuracy": "Expected accuracy, held out",
        "greedy_accuracy": "Greedy accuracy, held out",
        "reward": "Reward of the rollouts",
    },
)
CLOSENESS = Panel(
    "How far is the actor from the policy?", "nats per token", {"mismatch/kl_k3": "KL(behavior ‖ proximal)"}, log=True
)
CLIPPING = Panel(
    "How much is clipped?",
    "share of tokens",
    {
        "clip_ratio/region_mean": "Clipped on either side",
        "mismatch/capped_share": "Mismatch ratio ρ above the cap C",
    },
)
EXPLORING = Panel("Does the policy still explore?", "nats per token", {"entropy": "Entropy"})
CRITIC = Panel(
    "Does the critic predict the returns?",
    "share of their variance",
    {"critic/explained_variance": "Explained variance"},
)
PANELS = {
    "grpo": (LEARNING, CLOSENESS, CLIPPING, EXPLORING),
    "rloo": (LEARNING, CLOSENESS, CLIPPING._replace(unit="share of completions (ratio), of tokens (ρ)"), EXPLORING),
    "ppo": (LEARNING, CLOSENESS, CLIPPING, CRITIC),
}


def draw_figure(directory: Path, path: Path, algorithm: str = "grpo", title: str = "Three-digit addition") -> None:
    """Plot the four panels from the log of the run in `directory`, skipping metrics that were never logged."""
    from matplotlib.figure import Figure

    run = read_run(directory)
    figure = Figure(figsize=(8.4, 5.4), layout="constrained")
    for axes, panel in zip(figure.subplots(2, 2).ravel(), PANELS[algorithm], strict=True):
        for style, (metric, name) in enumerate(panel.lines.items()):
            draw_curve(axes, style, name, [run], metric)
        finish_axes(axes, panel.title, panel.unit, panel.log)
        if axes.lines:
            axes.margins(y=0.2)  # room for the legend
            axes.legend(fontsize=8, frameon=False)
    scheme = label(run.settings.get("rollout_quantization") or "none")
    figure.suptitle(f"{title}: {algorithm.upper()}, {scheme}, {run.settings.get('objective')}")
    figure.savefig(path, dpi=150)
