"""Runs in a notebook: they train in a process of their own while their curves are drawn, and are laid side by side.

A process of its own, because an engine gives its memory back only with the process it was started in; and because the
kernel is then free to draw. The curves are those of `trl-qurl report`, from the same `run.jsonl`.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from trl_qurl.lab.report.bars import bars_of, describe_bars, draw_bars
from trl_qurl.lab.report.child import run_child
from trl_qurl.lab.report.groups import group_runs, make_facets
from trl_qurl.lab.report.pictures import describe_plot, draw_plot, to_png
from trl_qurl.lab.report.plots import Curves, plots_of
from trl_qurl.lab.report.questions import KL, REGION_CLIPPED, REWARD, Question, ask
from trl_qurl.lab.report.runs import load_runs
from trl_qurl.trainers.run_log import RUN_LOG, Run, read_run

if TYPE_CHECKING:
    from IPython.display import HTML

METRICS = (REWARD.metric, KL.metric, REGION_CLIPPED.metric, "critic/explained_variance")
"""What is drawn, as far as it was logged, besides the scores on held-out questions and the seconds of a rollout."""

LOG_NAME = "output.log"

PICTURE_WIDTH = 370
"""Pixels; three fit beside each other into a notebook's usual width."""


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
        command: program and arguments, such as `[sys.executable, "train.py"]`.
        output_dir: the trainer's `output_dir`, where its `run.jsonl` appears.
        metrics: names of the metrics to draw; scores on held-out questions and seconds are always drawn.
        every: seconds between two drawings.

    Returns:
        The run as it was logged.

    Raises:
        ImportError: IPython or matplotlib is missing.
        RuntimeError: this is no notebook.
        ChildProcessError: the command failed; the message ends with the last lines that it printed.
        FileNotFoundError: it trained nothing there: `output_dir` is not the trainer's.
    """
    _require_libraries()
    output_dir = Path(output_dir)
    log = output_dir / RUN_LOG
    earlier = _identity(log)  # of a run that is put aside when the new one begins
    started = time.monotonic()
    drawing = _Drawing()

    def draw(printed: str, done: bool = False) -> None:
        run = read_run(log) if _identity(log) not in (None, earlier) else None
        drawing.show(run, metrics, time.monotonic() - started, printed, done)

    draw("starting")
    run_child(command, output_dir / LOG_NAME, draw, every)
    if _identity(log) in (None, earlier):
        raise FileNotFoundError(
            f"The command ended well and left no {RUN_LOG} in {output_dir}: give watch() the output_dir that the "
            "command gives its trainer."
        )
    draw("", done=True)
    return read_run(log)


def wait_for(command: Sequence[str | PathLike[str]], log: str | PathLike[str], *, every: float = 1.0) -> None:
    """Run a command that does not train, and show the last line it printed until it ends.

    Args:
        command: program and arguments.
        log: file for what it prints.
        every: seconds between two looks.

    Raises:
        ImportError: IPython is missing.
        RuntimeError: this is no notebook.
        ChildProcessError: the command failed; the message ends with the last lines that it printed.
    """
    _require_libraries()
    started = time.monotonic()
    drawing = _Drawing()

    def show(printed: str) -> None:
        drawing.update(_state(None, time.monotonic() - started, printed))

    show("starting")
    run_child(command, Path(log), show, every)
    drawing.update(_state(None, time.monotonic() - started, "", done=True))


def compare(runs: Sequence[Run | str | PathLike[str]], *, metrics: Sequence[str] = METRICS) -> HTML:
    """Several runs in one set of pictures, named by the settings in which they differ.

    Args:
        runs: runs, or their output directories.
        metrics: as for `watch`.

    Returns:
        What a notebook shows when it is a cell's last line.

    Raises:
        ImportError: IPython or matplotlib is missing.
        ValueError: nothing was given, or a file is not a run log.
        FileNotFoundError: a run has no log.
    """
    _require_libraries()
    from IPython.display import HTML

    loaded, _ = load_runs([run.path if isinstance(run, Run) else Path(run) for run in runs])
    return HTML(_pictures(loaded, metrics))


class _Drawing:
    """A place in a notebook's output whose content is exchanged."""

    def __init__(self) -> None:
        from IPython.display import HTML, display

        self._html = HTML
        self._handle = display(HTML(""), display_id=True)
        if self._handle is None:
            raise RuntimeError("There is no notebook to draw in: run the command by itself, then `trl-qurl report`.")
        self._drawn = ("", 0)  # the pictures, and the rows they show

    def update(self, html: str) -> None:
        self._handle.update(self._html(html))

    def show(self, run: Run | None, metrics: Sequence[str], seconds: float, printed: str, done: bool) -> None:
        """Where the run stands, and its pictures, which are made anew only when there is something new."""
        rows = len(run.rows) if run else 0
        if run and rows != self._drawn[1]:
            self._drawn = (_pictures([run], metrics), rows)
        self.update(_state(run, seconds, printed, done) + self._drawn[0])


def _state(run: Run | None, seconds: float, printed: str, done: bool = False) -> str:
    """A line on how far a command is; of a run with its steps, and what was printed last as long as it goes on."""
    parts = ["done" if done else "running", f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"]
    bar = ""
    if run and run.rows:
        step, steps = max(row["step"] for row in run.rows), run.settings.get("max_steps")
        known = isinstance(steps, int) and steps > 0
        parts.insert(1, f"step {step} of {steps}" if known else f"step {step}")
        bar = f'<progress value="{step}" max="{steps}" style="width:220px"></progress> ' if known else ""
    # A terminal's control characters would be shown as boxes.
    text = "".join(character for character in printed if character.isprintable())[:160]
    last = f'<div style="color:#777;font-size:12px;font-family:monospace">{escape(text)}</div>' if text else ""
    return f'<div style="margin:4px 0">{bar}{" · ".join(parts)}</div>{last}'


def _pictures(runs: Sequence[Run], metrics: Sequence[str]) -> str:
    """The pictures of runs as HTML that needs no other file; nothing for runs that have logged nothing."""
    if not any(run.rows for run in runs):
        return ""
    groups, _ = group_runs(runs)
    facets = make_facets(groups)
    curves = Curves(groups)
    logged = {name for run in runs for row in run.rows for name in row}
    drawn = [
        (to_png(draw_plot(plot)), describe_plot(plot))
        for question in ask(logged)
        for plot in plots_of(_only(question, metrics), facets, curves)
    ]
    drawn += [(to_png(draw_bars(bars)), describe_bars(bars)) for bars in bars_of(facets)]
    images = "".join(
        f'<img alt="{escape(text)}" style="width:{PICTURE_WIDTH}px;max-width:100%" '
        f'src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        for png, text in drawn
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:10px;align-items:flex-start">{images}</div>'


def _only(question: Question, metrics: Sequence[str]) -> Question:
    """A question with those of its measures that were asked for; scores on held-out questions always are."""
    panels = []
    for panel in question.panels:
        kept = tuple(m for m in panel.measures if m.metric in metrics or m.metric.startswith("eval_"))
        if kept:
            panels.append(panel._replace(measures=kept))
    return question._replace(panels=tuple(panels))


def _identity(log: Path) -> tuple[int, int] | None:
    """Which file this is, `None` for none: a run that begins replaces the file, and one that goes on adds to it."""
    if not log.is_file():
        return None
    status = log.stat()
    return status.st_ino, status.st_mtime_ns


def _require_libraries() -> None:
    if missing := [name for name in ("IPython", "matplotlib") if find_spec(name) is None]:
        raise ImportError(
            f"Runs are drawn in a notebook by {' and '.join(missing)}, which is not installed: run `pip install "
            "trl-qurl[report] ipykernel`, or draw a page with `trl-qurl report`."
        )
