"""What came of the demo: answers that changed, a picture, and three numbers in words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trl_qurl.lab.comparison import label, new_table
from trl_qurl.lab.curves import Points, draw, final_value, points_of
from trl_qurl.lab.report import panel
from trl_qurl.lab.runs import Run, read_run

if TYPE_CHECKING:
    from rich.table import Table

    from trl_qurl.lab.demo.task import Problem

ACCURACY = "expected_accuracy"
KL = "mismatch/kl_k3"

NEGLIGIBLE_KL = 0.001
"""Nats per token below which no objective made a difference in our runs (docs/metrics.md)."""

STORED = Path(__file__).with_name("stored_16_bits.jsonl.gz")
"""A run of `trl-qurl demo --scheme none`; benchmarks/README.md says how to make it."""

COLLAPSED = Path(__file__).with_name("stored_collapse.jsonl.gz")
"""The same task with codes of three bits and the ratio to the actor, from benchmarks/objectives."""


class Outcome(NamedTuple):
    """A run, and greedy answers of its actor to held-out problems."""

    run: Run
    accuracy: float  # of the policy, before the run
    problems: list[Problem]
    before: list[str]
    after: list[str]


def changed_answers(outcome: Outcome, count: int = 6) -> tuple[str, Table]:
    """Count the answers that changed, and build a table of the first `count`."""
    rows = []
    became_right = 0
    became_wrong = 0
    for problem, old, new in zip(outcome.problems, outcome.before, outcome.after, strict=True):
        right = str(problem.left + problem.right)
        if old != new:
            rows.append((f"{problem.left} + {problem.right}", right, old, new))
            became_right += new == right
            became_wrong += old == right
    said = (
        f"{len(rows)} of the actor's {len(outcome.problems)} greedy answers changed: "
        f"{became_right} became right, {became_wrong} wrong. The first:"
    )
    table = new_table("", "", ["sum"], ["right", "before", "after"])
    for row in rows[:count]:
        table.add_row(*row)
    return said, table


def draw_outcome(run: Run, path: Path) -> None:
    """Draw accuracy and mismatch, for GRPO beside those of two stored runs."""
    runs = {f"{name_of(run)} (this run)": run}
    if run.settings["algorithm"] == "GRPO":
        runs = {
            "16 bits (stored run)": read_run(STORED),
            **runs,
            "3 bits with the wrong ratio, quantized_ratio (stored run)": read_run(COLLAPSED),
        }
    accuracy = panel(ACCURACY, "Accuracy on held-out sums", "share of right samples", runs)
    draw([accuracy, panel(KL, "KL(actor ‖ policy)", "nats per token", runs)], path)


def name_of(run: Run) -> str:
    """Return the display name of a run's format."""
    return label(run.settings["rollout_quantization"] or "none")


def sentences(run: Run, accuracy: float) -> list[str]:
    """Say what the run did, how far its actor was from the policy, and what its format cost.

    `accuracy` is that of the policy before the run. Final values are means of the last 20 rollouts.
    """
    name = name_of(run)
    reached = final_value(points_of(run, ACCURACY)) or 0.0
    kl = final_value(points_of(run, KL)) or 0.0
    meaning = "From 0.001 on, the objective can matter, and growth is a warning."
    if kl < NEGLIGIBLE_KL:
        meaning = "Below 0.001, no objective made a difference in our runs."
    said = [
        f"Accuracy: of sums that it never trained on, the policy solved {accuracy:.1%} before and "
        f"{reached:.1%} after.",
        f"Mismatch: rounding moves the actor, which samples, {kl:.4f} nats per token (KL) away "
        f"from the policy, which learns. {meaning}",
    ]
    algorithm = run.settings["algorithm"]
    if algorithm != "GRPO":
        said.append(
            f"Cost: no 16-bit run of {algorithm} is stored. Repeat with --scheme none and another "
            "--output-dir, then compare: trl-qurl report DIR DIR"
        )
        return said
    last = max(points_of(run, ACCURACY).rollouts)
    rollouts, values = points_of(read_run(STORED), ACCURACY)
    stored = final_value(Points(rollouts[rollouts <= last], values[rollouts <= last])) or 0.0
    points = 100 * (reached - stored)
    said.append(
        f"Cost: after as many rollouts, the stored 16-bit run solved {stored:.1%}. {name} ended "
        f"{abs(points):.1f} points {'above' if points > 0 else 'below'}; single runs differ by a "
        "few points by chance. Over ten seeds, INT8 ended 0.4 ± 1.6 points above."
    )
    return said


def find_shortfall(run: Run, accuracy: float, required_share: float) -> str | None:
    """Explain in one sentence why the policy did not learn enough; return `None` if it did."""
    # Warm starts end at different accuracies on different CPUs, so a share of the errors is judged.
    reached = final_value(points_of(run, ACCURACY)) or 0.0
    share = (reached - accuracy) / (1 - accuracy)
    if share >= required_share:
        return None
    return (
        f"the policy's accuracy went from {accuracy:.3f} to {reached:.3f}, which is {share:.0%} of "
        f"its errors corrected; the demo requires at least {required_share:.0%}."
    )
