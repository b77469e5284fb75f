"""Runs in a notebook: they train in a process of their own while their curves are drawn, and are then compared.

A process of its own, because an engine gives its memory back only when its process ends, and because the kernel is
then free to draw. The curves are those of `trl-qurl report`, from the same `run.jsonl`.
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
"""What is drawn by default, as far as it was logged, besides held-out scores and the seconds of a rollout."""


def watch(
    command: Sequence[str | PathLike[str]],
    output_dir: str | PathLike[str],
    *,
    metrics: Sequence[str] = METRICS,
    every: float = 5.0,
) -> Run:
    """Run a command that trains, and draw its curves in place until it ends.

    What the command prints goes to `output.log` in the output directory. Interrupting the kernel ends the command and
    every process it started.

    Args:
        command: Program and arguments, such as `[sys.executable, "train.py"]`.
        output_dir: The trainer's `output_dir`, where its `run.jsonl` appears.
        metrics: Names of the metrics to draw; held-out scores and seconds are always drawn.
        every: Seconds between two drawings.

    Returns:
        The run as it was logged.

    Raises:
        ImportError: If IPython or matplotlib is missing.
        RuntimeError: If this is not a notebook.
        ChildProcessError: If the command failed; the message ends with the last lines that it printed.
        FileNotFoundError: If it trained nothing there: `output_dir` is not the trainer's.
    """
    output_dir = Path(output_dir)
    log = output_dir / RUN_LOG
    before = (None, _identity(log))  # no log, or that of a run that the trainer puts aside when the new one begins
    require("Drawing runs", "matplotlib", extra="report")
    from IPython.display import HTML, display

    if (handle := display(HTML(""), display_id=True)) is None:
        raise RuntimeError("There is no notebook to draw in: run the command by itself, then `trl-qurl report`.")
    started, drawn, rows = time.monotonic(), "", 0

    def draw(printed: str) -> None:
        nonlocal drawn, rows
        run = read_run(log) if _identity(log) not in before else None
        if run and len(run.rows) != rows:
            drawn, rows = _pictures([run], metrics), len(run.rows)
        handle.update(HTML(_state(run, time.monotonic() - started, printed) + drawn))

    draw("starting")
    run_child(command, output_dir / "output.log", draw, every)
    if _identity(log) in before:
        raise FileNotFoundError(
            f"The command succeeded but left no {RUN_LOG} in {output_dir}: give watch() the trainer's output_dir."
        )
    draw("")
    return read_run(log)


def compare(runs: Sequence[Run | str | PathLike[str]], *, metrics: Sequence[str] = METRICS) -> HTML:
    """Draw several runs in the same plots, named by the settings in which they differ.

    Args:
        runs: Runs, or their output directories.
        metrics: As for `watch`.

    Returns:
        What a notebook shows when it is a cell's last line.

    Raises:
        ImportError: If IPython or matplotlib is missing.
        ValueError, FileNotFoundError: As for `load_runs`.
    """
    require("Drawing runs", "matplotlib", extra="report")
    from IPython.display import HTML

    loaded, _ = load_runs([run.path if isinstance(run, Run) else Path(run) for run in runs])
    return HTML(_pictures(loaded, metrics))


def _state(run: Run | None, seconds: float, printed: str) -> str:
    """A line on the progress of a command, and what it printed last as long as it runs."""
    parts = ["running" if printed else "done", f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"]
    if run and run.rows:
        parts.insert(1, f"step {max(row['step'] for row in run.rows)} of {run.settings.get('max_steps')}")
    text = "".join(character for character in printed if character.isprintable())[:160]
    return f'<div>{" · ".join(parts)}</div><pre style="color:#777">{escape(text)}</pre>'


def _pictures(runs: Sequence[Run], metrics: Sequence[str]) -> str:
    """The figures of runs as HTML that needs no other file; nothing for runs that have logged nothing."""
    if not any(run.rows for run in runs):
        return ""
    groups, _ = group_runs(runs)
    logged = {name for run in runs for row in run.rows for name in row}
    panels = []
    for panel in (panel for question in ask(logged) for panel in question.panels):
        kept = tuple(m for m in panel.measures if m.metric in metrics or m.metric.startswith("eval_"))
        panels += [panel._replace(measures=kept)] if kept else []
    return "".join(
        f'<img alt="{escape(text)}" style="max-width:100%" src="data:image/png;base64,'
        f'{base64.b64encode(to_png(figure)).decode()}">'
        for figure, text in [*draw_lines(panels, groups, columns=3), *draw_seconds(groups)]
    )


def _identity(log: Path) -> tuple[int, int] | None:
    """Which file this is, `None` for none: a run that begins replaces the file; one that continues adds to it."""
    return (status.st_ino, status.st_mtime_ns) if log.is_file() and (status := log.stat()) else None
