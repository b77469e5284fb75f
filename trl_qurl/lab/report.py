"""`trl-qurl report`: compare runs in one table and one picture.

Trackers (`report_to`) draw every metric of a run. This shows the few that decide whether quantized
rollouts are healthy and faster. It needs only run logs: no torch, no TRL.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from trl_qurl.lab.comparison import new_table
from trl_qurl.lab.curves import FINAL_ROLLOUTS, Panel, Points, draw, final_value, points_of
from trl_qurl.lab.packages import require
from trl_qurl.lab.runs import Run, read_run

if TYPE_CHECKING:
    from rich.table import Table

Runs = Mapping[str, Run]
"""Runs by label."""

HELD_OUT = re.compile("expected_accuracy|eval_(reward|.*_avg@1)")
"""Metrics that score held-out questions."""

MISMATCH = ("mismatch/kl_k3", "mismatch/ratio_max")
LIMITS = {"mismatch/kl_k3": 0.005, "mismatch/ratio_max": 2.0}
"""What some metrics are seen against: a KL that did no harm, and the ratio's default cap."""

WORDS = {
    "reward": ("Reward", "mean over answers"),
    "expected_accuracy": ("Accuracy on held-out questions", "share of right samples"),
    "mismatch/kl_k3": ("KL(actor ‖ policy)", "nats per token"),
    "mismatch/ratio_max": ("Largest ratio ρ of a token", "policy / actor"),
}
"""Titles of panels, and units of their y axes."""

PICTURE = "report.png"
STEP = "step_time"
SECONDS = ("time/generate_s", "time/sync_s", STEP)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl report`."""
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        type=Path,
        help="output_dir of a run, or a run.jsonl(.gz)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path(PICTURE),
        help="picture to write, or a directory for it (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the picture, print the table and return exit status 0."""
    require("A report", "matplotlib", "rich", extra="report")
    from rich.console import Console

    runs = read_runs(args.runs)
    metrics = ("reward", *held_out_scores(runs), *MISMATCH)
    panels = [panel(metric, *words_for(metric), runs) for metric in metrics]
    weights = weight_panel(runs)
    if any(weights.lines.values()):
        panels.append(weights)
    picture: Path = args.output if args.output.suffix else args.output / PICTURE
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw(panels, picture)
    Console().print(build_table((*metrics, *SECONDS), runs))
    print(f"Picture: {picture}")
    return 0


def read_runs(places: Sequence[Path]) -> Runs:
    """Read runs. Their labels are their places, from the directory that has all of them."""
    paths = [place.absolute() for place in places]
    common = os.path.commonpath([path.parent for path in paths])
    runs = {}
    for path in paths:
        found = read_run(path)
        if not found.rows:
            raise ValueError(
                f"{found.path} has no rows yet: leave this run out, or wait for its first "
                "logging_steps."
            )
        label = os.path.relpath(path, common).removesuffix(".gz").removesuffix(".jsonl")
        if label in runs:
            raise ValueError(f"{label} is there twice: name each run once.")
        runs[label] = found
    return runs


def held_out_scores(runs: Runs) -> list[str]:
    """Return the logged metrics that score held-out questions."""
    logged: set[str] = set()
    for run in runs.values():
        logged.update(*run.rows)
    return sorted(filter(HELD_OUT.fullmatch, logged))


def panel(metric: str, title: str, unit: str, runs: Runs) -> Panel:
    """Return what to draw of a metric."""
    lines = {label: [points_of(run, metric)] for label, run in runs.items()}
    return Panel(title, unit, lines, logarithmic=metric in MISMATCH, limit=LIMITS.get(metric))


def words_for(metric: str) -> tuple[str, str]:
    """Return the title of a metric's panel, and the unit of its y axis."""
    task = metric.removeprefix("eval_").removesuffix("_avg@1")
    return WORDS.get(metric, (f"Held out: {task}", "mean over answers"))


def weight_panel(runs: Runs) -> Panel:
    """Return the sizes of rounding and of updates, as in the paper's Fig. 9.

    A single run has lines for kinds of layer; of several runs, each has the mean of its kinds.
    """
    return Panel(
        "Change of the weights: by rounding (solid), by updates (dashed)",
        "‖change‖² / ‖weights‖²",
        weight_lines("weights/rounding/", runs),
        logarithmic=True,
        dashed=weight_lines("weights/update/", runs),
        has_legend=len(runs) == 1,
    )


def weight_lines(prefix: str, runs: Runs) -> dict[str, list[Points]]:
    """Return the metrics with this prefix: by kind of layer for one run, by run for several."""
    lines: dict[str, list[Points]] = {}
    for label, run in runs.items():
        logged = dict.fromkeys(chain(*run.rows))  # in the order of the layers
        names = [name for name in logged if name.startswith(prefix)]
        if len(runs) == 1:
            return {name.removeprefix(prefix): [points_of(run, name)] for name in names}
        lines[label] = [points_of(run, name) for name in names]
    return lines


def build_table(metrics: Sequence[str], runs: Runs) -> Table:
    """Build a table with one row per run."""
    caption = (
        f"Means of the last {FINAL_ROLLOUTS} rollouts, in short runs of the last half. Seconds of "
        "a rollout: to generate, to sync, and with all of its updates."
    )
    table = new_table("", caption, ["run"], [heading(metric) for metric in metrics])
    for label, run in runs.items():
        values = [value_in_table(run, metric) for metric in metrics]
        table.add_row(label, *("–" if value is None else f"{value:.3g}" for value in values))
    return table


def heading(metric: str) -> str:
    """Return the heading of a narrow column, which leaves room for the labels."""
    if metric == STEP:
        return "whole\ns"
    return re.sub("mismatch/|time/", "", metric).replace("_", "\n")


def value_in_table(run: Run, metric: str) -> float | None:
    """Return a metric's final value, with the seconds of a step converted to a rollout's."""
    value = final_value(points_of(run, metric))
    if metric == STEP and value is not None:
        value *= run.settings.get("updates_per_rollout") or 1
    return value
