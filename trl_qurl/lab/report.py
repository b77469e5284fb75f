"""`trl-qurl report`: compare runs in one table and one picture.

Trackers (`report_to`) draw every metric of a run. This shows the few that decide whether quantized
rollouts are healthy and faster. It needs only run logs: no torch, no TRL.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_qurl.lab.comparison import label as format_label
from trl_qurl.lab.comparison import new_table
from trl_qurl.lab.curves import (
    COLORS,
    DASHES,
    FINAL_ROLLOUTS,
    final_value,
    interval,
    points_of,
    smooth,
)
from trl_qurl.lab.packages import require
from trl_qurl.lab.runs import Run, read_run
from trl_qurl.trainers.run_log import RUN_LOG

if TYPE_CHECKING:
    from rich.table import Table

Runs = Mapping[str, Run]

UNNAMED = ("model", "rollout_quantization", "algorithm", "objective")
"""Settings that a label shows first, by their values alone."""

BOOKKEEPING = re.compile(
    r"(arm|commit|dataloader|date|ddp|debug|disable_tqdm|do|eval|hardware|hub|local_rank|log|logging|output_dir|project"
    r"|num_completions_to_print|push_to_hub|report_to|resume_from_checkpoint|rollout_checkpoint_dir|run_name|save"
    r"|sync_check|trackio|versions|vllm_(group_port|request_timeout|server)|weight_metrics)(_|$)"
)
"""Settings of environment, output, measurements and engine connection, which do not change the
method.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl report`."""
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        type=Path,
        help="output_dir of a run or of several, or a run.jsonl(.gz)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("report.png"),
        help="picture to write (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the picture, print the table and return exit status 0."""
    require("A report", "matplotlib", "rich", extra="report")
    from rich.console import Console

    # A directory of runs stands for all of them that have rows.
    below = {
        path: [] if (path / RUN_LOG).exists() else sorted(path.glob(f"*/{RUN_LOG}"))
        for path in args.runs
    }
    found = [list(map(read_run, below[path] or [path])) for path in args.runs]
    logs = [run for each in found for run in [run for run in each if run.rows] or each]
    if empty := [log.path for log in logs if not log.rows]:
        raise ValueError(
            f"{empty[0]} has no rows yet: leave this run out, or wait for its first logging_steps."
        )
    runs = label_runs(logs)
    draw_report(runs, args.output)
    Console().print(build_table(runs))
    print(f"Picture: {args.output}")
    return 0


def label_runs(runs: Sequence[Run]) -> dict[str, Run]:
    """Name each run by its place and the settings in which the runs differ; runs in places of one
    name are numbered.

    Settings that some runs did not record, such as those of a newer TRL, are not compared.
    """
    names = [
        n
        for n in runs[0].settings
        if all(n in run.settings for run in runs) and not BOOKKEEPING.match(n)
    ]
    differing = [name for name in names if len({str(run.settings[name]) for run in runs}) > 1]
    shown = differing or [name for name in names if name in ("rollout_quantization", "objective")]
    shown.sort(key=lambda name: UNNAMED.index(name) if name in UNNAMED else len(UNNAMED))
    labels: dict[str, Run] = {}
    for run in runs:
        settings = [_describe(name, run.settings[name]) for name in shown[:4]] + ["..."] * (
            len(shown) > 4
        )
        place = (
            run.path.resolve().parent.name
            if run.path.name == RUN_LOG
            else run.path.name.partition(".")[0]
        )
        number = 1 + sum(label.partition(":")[0].partition(" #")[0] == place for label in labels)
        labels[
            f"{place}{f' #{number}' * (number > 1)}: {', '.join(settings)}".removesuffix(": ")
        ] = run
    return labels


def _describe(name: str, value: Any) -> str:
    if name == "rollout_quantization":
        return format_label(value or "none")
    return str(value) if name in UNNAMED else f"{name} {value}"


def held_out_scores(runs: Runs) -> list[str]:
    """Return the logged metrics that score held-out questions."""
    logged = {name for run in runs.values() for row in run.rows for name in row}
    return sorted(
        name
        for name in logged
        if re.fullmatch(r"(expected|held_out)_accuracy|eval_(reward|.*_avg@1)", name)
    )


def seconds_per_rollout(run: Run) -> tuple[float, float, float]:
    """Average the seconds of a rollout with its updates (a lower bound), its generation and its
    sync; 0 if not logged.

    The first rollout, which includes the warm-up, is left out. `time/update_s` and `step_time` are
    those of an update.
    """

    def mean(metric: str) -> float:
        rollouts, values = points_of(run, metric)
        later = values[rollouts > 1] if (rollouts > 1).any() else values
        return float(later.mean()) if later.size else 0.0

    updates = run.settings.get("updates_per_rollout") or 1
    generation, sync = mean("time/generate_s"), mean("time/sync_s")
    parts = (
        generation
        + sync
        + mean("time/logps_s")
        + mean("time/values_s")
        + updates * mean("time/update_s")
    )
    # TRL's excludes the optimizer's own step
    return max(parts, updates * mean("step_time")), generation, sync


def build_table(runs: Runs) -> Table:
    """Build a table with one row per run."""
    metrics = (*held_out_scores(runs), "reward", "mismatch/kl_k3")
    caption = (
        f"Means of the last {FINAL_ROLLOUTS} rollouts (in short runs of the last half), the "
        "largest ρ of the run, and the seconds per rollout with its updates, including those for "
        "generation and sync.\n" + "\n".join(runs)
    )
    headings = [name.replace("_", " ") for name in metrics[:-1]]
    table = new_table(
        "", caption, ["run"], (*headings, "KL", "largest ρ", "seconds", "generate", "sync")
    )
    table.columns[0].min_width = 12
    for label, run in runs.items():
        half = math.ceil(max(points_of(run, "reward").rollouts, default=2) / 2)
        means = [final_value(points_of(run, name), min(half, FINAL_ROLLOUTS)) for name in metrics]
        largest = max(points_of(run, "mismatch/ratio_max").values, default=None)
        seconds = [value or None for value in seconds_per_rollout(run)]
        table.add_row(label.partition(":")[0], *map(_format, [*means, largest, *seconds]))
    return table


def _format(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def draw_report(runs: Runs, path: Path) -> None:
    """Draw reward, held-out scores and mismatch over rollouts; the path's suffix selects the
    format.
    """
    from matplotlib.figure import Figure

    scores = held_out_scores(runs)
    titles = {
        "reward": "Reward of the rollouts",
        **{name: name.replace("_", " ").capitalize() for name in scores},
    }
    titles |= {
        "mismatch/kl_k3": "KL, nats per token",
        "mismatch/ratio_max": "Largest ratio ρ of each rollout",
    }
    rows, odd = -(-len(titles) // 2), len(titles) % 2  # if odd, the first panel is as wide as two
    figure = Figure(figsize=(8.4, 2.7 * rows + 0.22 * len(runs) + 0.2), layout="constrained")
    for position, (metric, title) in enumerate(titles.items(), start=1):
        axes = figure.add_subplot(rows, 2, (1, 2) if odd and position == 1 else position + odd)
        for style, (label, run) in enumerate(runs.items()):
            points, answers = points_of(run, metric), points_of(run, "held_out_answers")
            if points.values.size:
                line = (
                    points
                    if metric.endswith("_max")
                    else smooth(points, max(1.0, points.rollouts[-1] / 20))
                )
                is_short = points.values.size <= 20  # few points may make no line
                color, dashes = COLORS[style % len(COLORS)], DASHES[style % len(DASHES)]
                axes.plot(
                    *line,
                    marker="o" if is_short else "",
                    color=color,
                    linestyle=dashes,
                    label=label,
                    ms=4,
                )
                if metric.endswith("accuracy") and answers.values.size:
                    title = f"{title.partition(',')[0]}, 95 % intervals"
                    shade = axes.vlines if is_short else axes.fill_between
                    shade(line.rollouts, *interval(line, answers), color=color, alpha=0.25)
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
        axes.set_xlabel("rollout", fontsize=9)
        axes.locator_params(axis="x", integer=True)
        axes.grid(alpha=0.3, linewidth=0.6)
        low, high = axes.dataLim.intervaly
        if metric.startswith("mismatch/") and high > 10 * low > 0:
            axes.set_yscale("log", subs=(2, 5) if high < 100 * low else ())
        # do not magnify what hardly changes
        elif high - low < 0.05 and not metric.startswith("mismatch/"):
            axes.set_ylim(min(low, -0.02), max(high, 1.02))
        axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
    figure.suptitle(
        ", ".join(
            sorted({Path(run.settings.get("model") or "").name for run in runs.values()} - {""})
        )
    )
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower left", fontsize=9, frameon=False, handlelength=3.2
    )
    figure.savefig(path, format=path.suffix[1:] or "png", dpi=150)
