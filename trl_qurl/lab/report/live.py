"""Train in a separate process from a notebook, with live curves, and compare runs.

An engine frees its memory only when its process ends, and a separate process leaves the kernel free to draw. The
curves match `trl-qurl report` and come from the same `run.jsonl`.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from trl_qurl.lab.packages import require
from trl_qurl.lab.processes import run_child
from trl_qurl.lab.report.figures import draw_lines, draw_seconds, to_png
from trl_qurl.lab.report.groups import group_runs, load_runs
from trl_qurl.lab.report.questions import ask
from trl_qurl.trainers.run_log import RUN_LOG, Run, read_run

if TYPE_CHECKING:
    from IPython.display import HTML

METRICS = ("reward", "mismatch/kl_k3", "clip_ratio/region_mean", "critic/explained_variance")
"""Metrics to draw by default if they were logged, besides held-out scores and the seconds per rollout."""


def watch(
    command: Sequence[str | PathLike[str]],
    output_dir: str | PathLike[str],
    *,
    metrics: Sequence[str] = METRICS,
    every: float = 5.0,
) -> Run:
    """Run a training command and update its curves in place until it ends.

    The command's output goes to `output.log` in the output directory. Interrupting the kernel stops the command and
    all processes it started.

    Args:
        command: Program and arguments, such as `[sys.executable, "train.py"]`.
        output_dir: The trainer's `output_dir`, where it writes `run.jsonl`.
        metrics: Names of the metrics to draw; held-out scores and seconds are always drawn.
        every: Seconds between updates.

    Returns:
        The logged run.

    Raises:
        ImportError: If IPython or matplotlib is missing.
        RuntimeError: If this is not a notebook.
        ChildProcessError: If the command failed; the message ends with its last output lines.
        FileNotFoundError: If the command did not write a log to `output_dir`, so it is not the trainer's.
    """
    output_dir = Path(output_dir)
    log = output_dir / RUN_LOG
    before = (None, _identity(log))  # no log, or an earlier run's, which the trainer will move aside
    require("Drawing runs", "matplotlib", extra="report")
    from IPython.display import HTML, display

    if (handle := display(HTML(""), display_id=True)) is None:
        raise RuntimeError("watch() needs a notebook. Elsewhere, run the command directly, then `trl-qurl report`.")
    started, images, rows = time.monotonic(), "", 0

    def draw(last_line: str) -> None:
        nonlocal images, rows
        run = read_run(log) if _identity(log) not in before else None
        if run and len(run.rows) != rows:
            images, rows = _images([run], metrics), len(run.rows)
        handle.update(HTML(_state(run, time.monotonic() - started, last_line) + images))

    draw("starting")
    run_child(command, output_dir / "output.log", draw, every)
    if _identity(log) in before:
        raise FileNotFoundError(
            f"The command succeeded, but did not write {RUN_LOG} to {output_dir}: pass the trainer's output_dir."
        )
    draw("")
    return read_run(log)


def compare(runs: Sequence[Run | str | PathLike[str]], *, metrics: Sequence[str] = METRICS) -> HTML:
    """Draw several runs in the same plots, labeled by the settings in which they differ.

    Args:
        runs: Runs, or their output directories.
        metrics: Names of the metrics to draw, as in `watch`.

    Returns:
        HTML that a notebook displays if it is the last expression of a cell.

    Raises:
        ImportError: If IPython or matplotlib is missing.
        ValueError, FileNotFoundError: As for `load_runs`.
    """
    require("Drawing runs", "matplotlib", extra="report")
    from IPython.display import HTML

    loaded, _ = load_runs([run.path if isinstance(run, Run) else Path(run) for run in runs])
    return HTML(_images(loaded, metrics))


def _state(run: Run | None, seconds: float, last_line: str) -> str:
    """Format the progress of a command, and its last output line while it runs."""
    parts = ["running" if last_line else "done", f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"]
    if run and run.rows:
        parts.insert(1, f"step {max(row['step'] for row in run.rows)} of {run.settings.get('max_steps')}")
    text = "".join(character for character in last_line if character.isprintable())[:160]
    return f'<div>{" · ".join(parts)}</div><pre style="color:#777">{escape(text)}</pre>'


def _images(runs: Sequence[Run], metrics: Sequence[str]) -> str:
    """Render the runs' figures as self-contained HTML; empty if nothing has been logged."""
    if not any(run.rows for run in runs):
        return ""
    groups, _ = group_runs(runs)
    logged = {name for run in runs for row in run.rows for name in row}
    panels = []
    for panel in (panel for question in ask(logged) for panel in question.panels):
        measures = tuple(m for m in panel.measures if m.metric in metrics or m.metric.startswith("eval_"))
        panels += [panel._replace(measures=measures)] if measures else []
    return "".join(
        f'<img alt="{escape(text)}" style="max-width:100%" src="data:image/png;base64,'
        f'{base64.b64encode(to_png(figure)).decode()}">'
        for figure, text in [*draw_lines(panels, groups, columns=3), *draw_seconds(groups)]
    )


def _identity(log: Path) -> tuple[int, int] | None:
    """Identify the log file, `None` if it does not exist. A new run replaces the file; a resumed run appends to it."""
    return (status.st_ino, status.st_mtime_ns) if log.is_file() and (status := log.stat()) else None
