"""`trl-qurl report`: compare runs in one table and one picture.

Trackers (`report_to`) draw every metric of a run. This shows the few that decide whether quantized
rollouts are healthy and faster. It needs only run logs: no torch, no TRL.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
    from matplotlib.axes import Axes
    from rich.table import Table

Runs = Mapping[str, Run]

UNNAMED = ("model", "rollout_quantization", "algorithm", "objective")
"""Settings that a label shows first, by their values alone."""

BOOKKEEPING = re.compile(
    r"(arm|commit|dataloader|date|ddp|debug|disable_tqdm|do|eval|hardware|hub|local_rank|log|logging|output_dir|project"
    r"|num_completions_to_print|push_to_hub|report_to|resume_from_checkpoint|rollout_checkpoint_dir|run_name|save"
    r"|sync_check|trackio|versions|vllm_(group_port|request_timeout|server)|weight_metrics)(_|$)"
)
"""Settings of environment, output, measurements and connections, which do not change the method."""

HELD_OUT = re.compile(r"(expected|held_out)_accuracy|eval_(reward|.*_avg@1)")
"""Metrics that score held-out questions."""


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

    runs = label_runs(_read_logs(args.runs))
    draw_report(runs, args.output)
    Console().print(build_table(runs))
    print(f"Picture: {args.output}")
    return 0


def _read_logs(paths: Sequence[Path]) -> list[Run]:
    """Read the logs of runs; a directory of runs stands for all of them that have rows."""
    logs: list[Run] = []
    for path in paths:
        files = [path]
        if not (path / RUN_LOG).exists():
            files = sorted(path.glob(f"*/{RUN_LOG}")) or [path]
        found = [read_run(file) for file in files]
        with_rows = [log for log in found if log.rows]
        logs += with_rows or found
    for log in logs:
        if not log.rows:
            raise ValueError(
                f"{log.path} has no rows yet: leave this run out, or wait for its first "
                "logging_steps."
            )
    return logs


def label_runs(runs: Sequence[Run]) -> dict[str, Run]:
    """Name each run by its place and the settings in which the runs differ.

    Runs in places of one name are numbered.
    """
    shown = _settings_to_show(runs)
    labels: dict[str, Run] = {}
    places: Counter[str] = Counter()
    for run in runs:
        if run.path.name == RUN_LOG:
            place = run.path.resolve().parent.name
        else:
            place = run.path.name.partition(".")[0]
        places[place] += 1
        label = place if places[place] == 1 else f"{place} #{places[place]}"
        settings = [_describe(name, run.settings[name]) for name in shown[:4]]
        if len(shown) > 4:
            settings.append("...")
        if settings:
            label += f": {', '.join(settings)}"
        labels[label] = run
    return labels


def _settings_to_show(runs: Sequence[Run]) -> list[str]:
    """Return the settings in which runs differ, or else the format and the objective.

    Settings that some runs did not record, such as those of a newer TRL, are not compared.
    """
    recorded_by_all = set.intersection(*(set(run.settings) for run in runs))
    names = [
        name for name in runs[0].settings if name in recorded_by_all and not BOOKKEEPING.match(name)
    ]
    shown = []
    for name in names:
        values = {str(run.settings[name]) for run in runs}
        if len(values) > 1:
            shown.append(name)
    if not shown:
        shown = [name for name in names if name in ("rollout_quantization", "objective")]
    first = [name for name in UNNAMED if name in shown]
    return first + [name for name in shown if name not in UNNAMED]


def _describe(name: str, value: Any) -> str:
    if name == "rollout_quantization":
        return format_label(value or "none")
    return str(value) if name in UNNAMED else f"{name} {value}"


def held_out_scores(runs: Runs) -> list[str]:
    """Return the logged metrics that score held-out questions."""
    logged: set[str] = set()
    for run in runs.values():
        logged.update(*run.rows)
    return sorted(name for name in logged if HELD_OUT.fullmatch(name))


class Seconds(NamedTuple):
    """Mean seconds of a rollout; 0 if not logged."""

    whole: float  # with its updates; a lower bound
    generation: float
    sync: float


def seconds_per_rollout(run: Run) -> Seconds:
    """Average the seconds of a rollout, of its generation and of its sync.

    The first rollout, which includes the warm-up, is left out. `time/update_s` and `step_time` are
    those of an update.
    """
    generation = _mean_without_warm_up(run, "time/generate_s")
    sync = _mean_without_warm_up(run, "time/sync_s")
    logps = _mean_without_warm_up(run, "time/logps_s")
    values = _mean_without_warm_up(run, "time/values_s")
    updates = run.settings.get("updates_per_rollout") or 1
    update = updates * _mean_without_warm_up(run, "time/update_s")
    # TRL's excludes the optimizer's own step.
    step = updates * _mean_without_warm_up(run, "step_time")
    return Seconds(max(generation + sync + logps + values + update, step), generation, sync)


def _mean_without_warm_up(run: Run, metric: str) -> float:
    rollouts, values = points_of(run, metric)
    is_later = rollouts > 1
    if is_later.any():
        values = values[is_later]
    return float(values.mean()) if values.size else 0.0


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
        figures = [_format(value) for value in (*means, largest, *seconds)]
        table.add_row(label.partition(":")[0], *figures)
    return table


def _format(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def draw_report(runs: Runs, path: Path) -> None:
    """Draw reward, held-out scores and mismatch over rollouts, in the format of the path's suffix.

    If the number of panels is odd, the first is as wide as two.
    """
    from matplotlib.figure import Figure

    titles = {"reward": "Reward of the rollouts"}
    for name in held_out_scores(runs):
        titles[name] = name.replace("_", " ").capitalize()
    titles["mismatch/kl_k3"] = "KL, nats per token"
    titles["mismatch/ratio_max"] = "Largest ratio ρ of each rollout"
    cells: list[int | tuple[int, int]] = [*range(1, len(titles) + 1)]
    if len(titles) % 2:
        cells = [(1, 2), *range(3, len(titles) + 2)]
    rows = math.ceil(len(titles) / 2)
    figure = Figure(figsize=(8.4, 2.7 * rows + 0.22 * len(runs) + 0.2), layout="constrained")
    for cell, (metric, title) in zip(cells, titles.items(), strict=True):
        _draw_panel(figure.add_subplot(rows, 2, cell), metric, title, runs)
    models = {Path(run.settings.get("model") or "").name for run in runs.values()}
    figure.suptitle(", ".join(sorted(models - {""})))
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower left", fontsize=9, frameon=False, handlelength=3.2
    )
    figure.savefig(path, format=path.suffix[1:] or "png", dpi=150)


def _draw_panel(axes: Axes, metric: str, title: str, runs: Runs) -> None:
    """Draw one metric of all runs."""
    for style, (label, run) in enumerate(runs.items()):
        points = points_of(run, metric)
        if not points.values.size:
            continue
        line = points
        if not metric.endswith("_max"):
            line = smooth(points, max(1.0, points.rollouts[-1] / 20))
        color = COLORS[style % len(COLORS)]
        dashes = DASHES[style % len(DASHES)]
        is_short = points.values.size <= 20  # few points may make no line
        marker = "o" if is_short else ""
        axes.plot(*line, marker=marker, color=color, linestyle=dashes, label=label, ms=4)
        answers = points_of(run, "held_out_answers")
        if metric.endswith("accuracy") and answers.values.size:
            title = f"{title.partition(',')[0]}, 95 % intervals"
            low, high = interval(line, answers)
            shade = axes.vlines if is_short else axes.fill_between
            shade(line.rollouts, low, high, color=color, alpha=0.25)
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel("rollout", fontsize=9)
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3, linewidth=0.6)
    is_mismatch = metric.startswith("mismatch/")
    low, high = axes.dataLim.intervaly
    if is_mismatch and high > 10 * low > 0:
        axes.set_yscale("log", subs=(2, 5) if high < 100 * low else ())
    elif not is_mismatch and high - low < 0.05:  # do not magnify what hardly changes
        axes.set_ylim(min(low, -0.02), max(high, 1.02))
    axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
