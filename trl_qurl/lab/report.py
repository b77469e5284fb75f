"""`trl-qurl report`: compare runs in one table and one picture, grouped over seeds.

Trackers (`report_to`) draw every metric of a run. This shows the few that decide whether quantized rollouts are
healthy and faster. It needs only run logs: no torch, no TRL.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trl_qurl.lab.comparison import label as format_label
from trl_qurl.lab.comparison import new_table
from trl_qurl.lab.curves import (
    COLORS,
    FINAL_ROLLOUTS,
    draw_curve,
    final_value,
    finish_axes,
    points_of,
    updates_per_rollout,
)
from trl_qurl.lab.packages import require
from trl_qurl.quantization.plan import format_name
from trl_qurl.trainers.run_log import Run, read_run

if TYPE_CHECKING:
    from rich.table import Table

Groups = Mapping[str, Sequence[Run]]

UNNAMED = ("model", "rollout_quantization", "algorithm", "objective")
"""Settings that a label shows first, by their values alone."""

BOOKKEEPING = re.compile(
    r"(arm|commit|data_seed|dataloader|date|ddp|debug|disable_tqdm|do|eval|hardware|hub|local_rank|log|logging"
    r"|num_completions_to_print|output_dir|project|push_to_hub|report_to|resume_from_checkpoint"
    r"|rollout_checkpoint_dir|run_name|save|seed|sync_check|trackio|versions|vllm_group_port"
    r"|vllm_request_timeout|vllm_server|weight_metrics)(_|$)"
)
"""Settings of environment, output, measurements and engine connection, which do not change the method."""


class Seconds(NamedTuple):
    """Mean seconds of a rollout with its updates; `total` is a lower bound."""

    total: float
    generation: float
    sync: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl report`."""
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="output_dir of a run, or its run.jsonl(.gz)")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.png"), help="picture to write (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the picture, print the table and return exit status 0."""
    require("A report", "matplotlib", "rich", extra="report")
    from rich.console import Console

    runs = [read_run(path) for path in args.runs]
    for log in runs:
        if not log.rows:
            raise ValueError(f"{log.path} has no rows yet: leave this run out, or wait for its first logging_steps.")
    groups = group_runs(runs)
    draw_report(groups, args.output)
    Console().print(build_table(groups))
    print(f"Picture: {args.output}")
    return 0


def group_runs(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs that differ only in their seed, by a label of the settings in which the groups differ.

    Settings that some runs did not record, such as those of a newer TRL, are not compared. A repeated seed would make
    the spread over seeds look too small, so it starts another group: "INT8, acr #2".
    """
    recorded = [name for name in runs[0].settings if all(name in run.settings for run in runs)]
    names = [name for name in recorded if not BOOKKEEPING.match(name)]
    differing = [name for name in names if len({str(run.settings[name]) for run in runs}) > 1]
    shown = differing or [name for name in names if name in ("rollout_quantization", "objective")]
    shown.sort(key=lambda name: UNNAMED.index(name) if name in UNNAMED else len(UNNAMED))
    groups: dict[str, list[Run]] = {}
    for run in runs:
        text = ", ".join(_describe(name, run.settings[name]) for name in shown) or "all runs"
        labels = (text if number == 1 else f"{text} #{number}" for number in count(1))
        label = next(label for label in labels if _seed(run) not in map(_seed, groups.get(label, [])))
        groups.setdefault(label, []).append(run)
    return groups


def _describe(name: str, value: Any) -> str:
    if name == "rollout_quantization":
        return format_label(format_name(value))
    return str(value) if name in UNNAMED else f"{name} {value}"


def _seed(run: Run) -> tuple[Any, Any]:
    return run.settings.get("seed"), run.settings.get("data_seed")


def held_out_scores(groups: Groups) -> list[str]:
    """Return the logged metrics that score held-out questions."""
    logged = {name for runs in groups.values() for run in runs for row in run.rows for name in row}
    return sorted(name for name in logged if re.fullmatch(r"expected_accuracy|eval_reward|eval_.*_avg@1", name))


def seconds_per_rollout(run: Run) -> Seconds:
    """Average the seconds of a rollout, without the first one, which includes the warm-up; 0 if they were not logged.

    `time/update_s` and `step_time` are seconds per optimizer update, the others per rollout. TRL's `step_time`
    includes everything except the optimizer's own step.
    """

    def mean(metric: str) -> float:
        rollouts, values = points_of(run, metric)
        later = values[rollouts > 1] if (rollouts > 1).any() else values
        return float(later.mean()) if later.size else 0.0

    updates = updates_per_rollout(run)
    generation, sync = mean("time/generate_s"), mean("time/sync_s")
    parts = generation + sync + mean("time/logps_s") + mean("time/values_s") + updates * mean("time/update_s")
    return Seconds(max(parts, updates * mean("step_time")), generation, sync)


def build_table(groups: Groups) -> Table:
    """Build a table with one row per group: means over its seeds."""
    scores = (*held_out_scores(groups), "reward")
    caption = (
        f"Means over seeds (± standard deviation) of the last {FINAL_ROLLOUTS} rollouts, of each run's largest ρ, and "
        "of the seconds per rollout with its updates, including those for generation and sync."
    )
    headings = [name.replace("_", " ") for name in scores]
    figures = ("seeds", *headings, "KL", "largest ρ", "seconds", "generate", "sync")
    table = new_table("", caption, ["runs"], figures)
    table.columns[0].min_width = 12
    for label, runs in groups.items():
        metrics = [_format([final_value(points_of(run, name)) for run in runs], spread=True) for name in scores]
        kl = _format([final_value(points_of(run, "mismatch/kl_k3")) for run in runs])
        ratios = [max(points_of(run, "mismatch/ratio_max").values, default=None) for run in runs]
        times = zip(*map(seconds_per_rollout, runs), strict=True)
        seconds = [_format([value or None for value in column]) for column in times]
        table.add_row(label, str(len(runs)), *metrics, kl, _format(ratios), *seconds)
    return table


def _format(seeds: Sequence[float | None], spread: bool = False) -> str:
    values = [value for value in seeds if value is not None]
    if not values:
        return "–"
    deviation = f" ± {statistics.stdev(values):.1g}" if spread and len(values) > 1 else ""
    mean = statistics.mean(values)
    return f"{mean:.0f}{deviation}" if mean >= 100 else f"{mean:.3g}{deviation}"


def draw_report(groups: Groups, path: Path) -> None:
    """Draw reward, held-out scores, mismatch and, to compare groups, seconds; the path's suffix selects the format."""
    from matplotlib.figure import Figure

    scores = held_out_scores(groups)
    titles = {"reward": "Reward of the rollouts", **{name: name.replace("_", " ").capitalize() for name in scores}}
    titles |= {"mismatch/kl_k3": "KL, nats per token", "mismatch/ratio_max": "Largest ratio ρ"}
    rows = -(-(len(titles) + (len(groups) > 1)) // 2)
    figure = Figure(figsize=(8.4, 2.7 * rows + 0.22 * len(groups)), layout="constrained")
    for position, (metric, title) in enumerate(titles.items(), start=1):
        axes = figure.add_subplot(rows, 2, position)
        for style, (label, runs) in enumerate(groups.items()):
            draw_curve(axes, style, label, runs, metric)
        finish_axes(axes, title, log=metric.startswith("mismatch/"))
    if len(groups) > 1:
        bars = figure.add_subplot(rows, 2, len(titles) + 1)
        for style, runs in enumerate(groups.values()):
            totals = [seconds.total for run in runs if (seconds := seconds_per_rollout(run)).total]
            bars.barh(style, statistics.mean(totals or [0.0]), color=COLORS[style % len(COLORS)])
        bars.set_yticks([])
        bars.set_ylim(max(len(groups), 4) - 0.5, -0.5)  # the first group on top, and bars not too thick
        finish_axes(bars, "Seconds per rollout")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", fontsize=9, frameon=False, handlelength=3.2)
    figure.savefig(path, format=path.suffix[1:] or "png", dpi=150)
