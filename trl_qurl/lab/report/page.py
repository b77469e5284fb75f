"""`trl-qurl report`: write one self-contained HTML page.

Everything that can go wrong (a missing library or log, an output that is not writable) fails before the slow work.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from trl_qurl.lab.packages import require
from trl_qurl.lab.report.curves import (
    FINAL_ROLLOUTS,
    Estimate,
    estimate,
    final_value,
    points_of,
    rollouts_of,
    seconds_per_rollout,
    smoothing_window,
    updates_per_rollout,
)
from trl_qurl.lab.report.figures import draw_lines, draw_seconds, to_png
from trl_qurl.lab.report.groups import BOOKKEEPING, WORDED, Group, as_text, differing, flatten, group_runs, load_runs
from trl_qurl.lab.report.questions import MEASURES, Measure, Question, ask
from trl_qurl.trainers.run_log import RUN_LOG, Run

__all__ = ["Report", "write_report"]


@dataclass(frozen=True)
class Report:
    """The result of `write_report`."""

    page: Path  # the HTML file
    notes: tuple[str, ...]  # omissions and caveats, which are also on the page


class Table(NamedTuple):
    """Cells of a table; the first cell of each row is its heading."""

    header: list[str]
    rows: list[list[str]]


class Section(NamedTuple):
    """A question, its figures as (PNG, description), and the metrics in them."""

    question: Question
    figures: list[tuple[bytes, str]]
    metrics: list[str]


def write_report(paths: Sequence[Path], output: Path) -> Report:
    """Write an HTML page about runs.

    Args:
        paths: Output directories of runs, or their `run.jsonl`, which may be gzipped.
        output: HTML file to write.

    Returns:
        The page, with notes on omissions and caveats.

    Raises:
        ImportError: If matplotlib or Jinja is missing.
        ValueError: If nothing was logged, a file is not a run log, or `output` is one of the logs.
        OSError: If a log is missing (`FileNotFoundError`), or `output` is not writable.
    """
    require("A report", "matplotlib", "jinja2", extra="report")
    output = Path(output)
    runs, notes = load_runs([Path(path) for path in paths])
    _check_output(output, runs)
    groups, group_notes = group_runs(runs)
    notes += group_notes
    logged = {name for run in runs for row in run.rows for name in row}
    questions = ask(logged)
    sections = _draw_sections(questions, logged, groups)
    output.write_text(_render(groups, questions, sections, notes), encoding="utf-8")
    return Report(output, tuple(notes))


def _check_output(output: Path, runs: Sequence[Run]) -> None:
    if any(output.exists() and output.samefile(run.path) for run in runs):
        raise ValueError(f"The report would overwrite {output}, the log of one of its runs: choose another file.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.open("a").close()
    except OSError as error:
        message = f"Cannot write the report to {output} ({error.strerror}): choose a writable file."
        raise OSError(message) from error


def _draw_sections(questions: Sequence[Question], logged: set[str], groups: Sequence[Group]) -> list[Section]:
    """Draw the questions that the runs have metrics for."""
    sections: list[Section] = []
    for question in questions:
        described = draw_lines(question.panels, groups) if question.panels else draw_seconds(groups)
        figures = [(to_png(figure), text) for figure, text in described]
        metrics = [measure.metric for panel in question.panels for measure in panel.measures]
        if figures:
            sections.append(Section(question, figures, [metric for metric in metrics if metric in logged]))
    return sections


def _render(
    groups: Sequence[Group], questions: Sequence[Question], sections: Sequence[Section], notes: Sequence[str]
) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["base64"] = lambda png: base64.b64encode(png).decode("ascii")
    environment.filters["as_text"] = lambda value: as_text(value, longest=80)
    template = environment.from_string(files(__package__).joinpath("template.html").read_text(encoding="utf-8"))
    runs = [(group, run) for group in groups for run in group.runs]
    settings = [flatten(run.settings) for _, run in runs]
    answerable = [section.question for section in sections]
    return template.render(
        title=title_of(groups),
        notes=notes,
        summary=summary_table(groups, questions[0].panels[1].measures),
        differences=differences_table(groups),
        sections=sections,
        unanswered=[question.name for question in questions if question not in answerable],
        final=FINAL_ROLLOUTS,
        window=smoothing_window(max(rollouts_of(run) for _, run in runs)),
        updates=sorted({updates_per_rollout(run) for _, run in runs}),
        several_seeds=len(runs) > len(groups),
        runs=runs,
        common={
            name: value
            for name, value in sorted(settings[0].items())
            if not BOOKKEEPING.match(name) and all(name in run and run[name] == value for run in settings)
        },
    )


def title_of(groups: Sequence[Group]) -> str:
    """Build the page title: name, model, settings and date of a single run, or the number of runs."""
    count = sum(len(group.runs) for group in groups)
    if count > 1:
        return f"{count} runs in {len(groups)} group{'s' if len(groups) > 1 else ''}"
    (group,) = groups
    (run,) = group.runs
    file = run.path.resolve()
    name = file.parent.name if file.name.startswith(RUN_LOG) else file.name.split(".jsonl")[0]
    model = WORDED["model"](group.settings.get("model") or "")
    day = group.settings.get("date") or date.fromtimestamp(file.stat().st_mtime).isoformat()
    return f"{name}: {', '.join(as_text(text, 80) for text in (model, group.label, day) if text)}"


def summary_table(groups: Sequence[Group], scores: Sequence[Measure]) -> Table:
    """Build a table of means over seeds with confidence intervals, one row per group, logged metrics only."""
    columns: dict[str, Callable[[Run], float | None]] = {
        measure.label: lambda run, metric=measure.metric: final_value(points_of(run, metric))  # type: ignore[misc]
        for measure in (*scores, MEASURES["reward"], Measure("mismatch/kl_k3", "KL, nats"))
    }
    columns["Largest ρ"] = lambda run: max(points_of(run, "mismatch/ratio_max").values, default=None)
    columns["Clipped"] = lambda run: final_value(points_of(run, "clip_ratio/region_mean"))
    columns["Seconds per rollout"] = lambda run: sum(seconds_per_rollout(run).values()) or None
    header = ["Runs", "Seeds", "Rollouts"]
    rows = [[group.label, str(len(group.runs)), _lengths(group)] for group in groups]
    for heading, value in columns.items():
        by_group = [[number for run in group.runs if (number := value(run)) is not None] for group in groups]
        if any(by_group):
            header.append(heading)
            for row, numbers in zip(rows, by_group, strict=True):
                summary = Estimate(max(numbers), None) if numbers and "ρ" in heading else estimate(numbers)
                row.append(_format_estimate(summary))
    return Table(header, rows)


def differences_table(groups: Sequence[Group]) -> Table:
    """Build a table with one row per group and one column per setting in which groups differ."""
    names = differing([group.settings for group in groups])
    cells = [[as_text(group.settings.get(name, "not recorded"), 80) for name in names] for group in groups]
    return Table(["Runs", *names], [[group.label, *texts] for group, texts in zip(groups, cells, strict=True)])


def _lengths(group: Group) -> str:
    lengths = sorted({rollouts_of(run) for run in group.runs})
    return f"{lengths[0]:g}" if len(lengths) == 1 else f"{lengths[0]:g} to {lengths[-1]:g}"


def _format_estimate(value: Estimate | None) -> str:
    """Format a mean with its error, both to the error's second digit."""
    if value is None:
        return "–"
    mean, error = value
    if not error:
        return f"{mean:.3g}"
    decimals = max(0, 1 - math.floor(math.log10(error)))
    return f"{mean:.3g} ± {error:.2g}" if error < 1e-4 else f"{mean:.{decimals}f} ± {error:.{decimals}f}"
