"""The demo's plot: did the policy learn, did the actor stay close, what was clipped, what did rounding cost."""

from __future__ import annotations

from pathlib import Path

from trl_qurl.lab.report.figures import draw_lines, to_png
from trl_qurl.lab.report.groups import group_runs
from trl_qurl.lab.report.questions import MEASURES, Measure, Panel
from trl_qurl.trainers.run_log import read_run

SCORES = (MEASURES["expected_accuracy"], MEASURES["greedy_accuracy"], MEASURES["reward"])
CLIPPED = (MEASURES["clip_ratio/region_mean"], Measure("mismatch/capped_share", "Mismatch ratio ρ above the cap C"))
WEIGHTS = (
    Measure("weights/normalized_update", "Update per rollout (Eq. 13)"),
    Measure("weights/normalized_quantization_error", "Quantization error (Eq. 14)"),
)
EXPLAINED = (MEASURES["critic/explained_variance"],)
COMMON = (
    Panel("Does the policy learn?", "share of problems", SCORES),
    Panel("How far is the actor from the policy?", "nats per token", (MEASURES["mismatch/kl_k3"],), log=True),
    Panel("How much is clipped?", "share of tokens", CLIPPED, percent=True, from_zero=True),
)
REACHED = Panel("Do updates reach the rounded weights?", "share of the squared norm", WEIGHTS, log=True)
LEARNING, CLOSENESS, CLIPPING = COMMON
PANELS = {
    "grpo": (*COMMON, REACHED),
    "rloo": (LEARNING, CLOSENESS, CLIPPING._replace(unit="share of completions (ratio), of tokens (ρ)"), REACHED),
    "ppo": (
        *COMMON,
        Panel("Does the critic predict the returns?", "share of their variance", EXPLAINED, at_least=-0.5),
    ),
}


def draw_figure(directory: Path, path: Path, algorithm: str = "grpo", title: str = "Three-digit addition") -> None:
    """Plot the four panels from the log of the run in `directory`, skipping metrics that were never logged."""
    groups, _ = group_runs([read_run(directory)])
    ((figure, _),) = draw_lines(PANELS[algorithm], groups)
    figure.suptitle(f"{title}: {algorithm.upper()}, {groups[0].label}")
    path.write_bytes(to_png(figure))
