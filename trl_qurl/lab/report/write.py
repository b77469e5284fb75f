"""`write_report`: check, read, draw, write, in this order; what can go wrong does so before anything slow is done."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from trl_qurl.lab.report.bars import bars_of, describe_bars, draw_bars
from trl_qurl.lab.report.groups import Facet, group_runs, make_facets
from trl_qurl.lab.report.page import Content, Picture, Section, render_page
from trl_qurl.lab.report.pictures import describe_plot, draw_plot, to_png
from trl_qurl.lab.report.plots import Curves, plots_of
from trl_qurl.lab.report.questions import Question, ask
from trl_qurl.lab.report.runs import load_runs
from trl_qurl.lab.report.summary import differences_table, summary_table
from trl_qurl.trainers.run_log import Run

__all__ = ["Report", "write_report"]

NEEDED = ("matplotlib", "jinja2")

LONGEST_NAME = 80

PICTURE_FILE = re.compile(r"\d\d-[\w-]+\.png")
"""Files in the folder of pictures that are a report's, and so may be replaced and removed by it."""


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes:
        page: the HTML file.
        pictures: the same pictures as files, in the order of the page.
        notes: what was left out or could be misread; the page says it too.
    """

    page: Path
    pictures: tuple[Path, ...]
    notes: tuple[str, ...]


def write_report(paths: Sequence[Path], output: Path) -> Report:
    """Write one HTML page on runs, which needs no other file, and its pictures into a folder beside it.

    The page of an earlier report is replaced when the new one is complete; then pictures that are no longer in it are
    removed from the folder, `<output's stem>-pictures`.

    Args:
        paths: directories of runs, or their `run.jsonl`, which may be gzipped.
        output: the page.

    Returns:
        What was written, and what should be said about it.

    Raises:
        ImportError: matplotlib or Jinja is missing.
        ValueError: there is nothing to report on, a file is not a run log, or `output` is one of the logs.
        OSError: a log is missing (`FileNotFoundError`), or `output` cannot be written.
    """
    _require_libraries()
    output = Path(output)
    runs, notes = load_runs([Path(path) for path in paths])
    _check_output(output, runs)
    groups, group_notes = group_runs(runs)
    facets = make_facets(groups)
    curves = Curves(groups)
    metrics = {name for run in runs for row in run.rows for name in row}
    questions = ask(metrics)
    sections = _draw_sections(questions, metrics, facets, curves)
    answered = [section.question for section in sections]
    content = Content(
        groups=groups,
        summary=summary_table(groups, questions[0].panels[1].measures),
        differences=differences_table(groups),
        sections=sections,
        unanswered=[question.name for question in questions if question not in answered],
        notes=[*notes, *group_notes],
        window=curves.window,
    )
    pictures = _write_pictures(_folder(output), sections)
    _replace(output, render_page(content).encode("utf-8"))
    return Report(output, pictures, tuple(content.notes))


def _require_libraries() -> None:
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise ImportError(
            f"A report needs {' and '.join(missing)}, which is not installed: run `pip install trl-qurl[report]`."
        )


def _check_output(output: Path, runs: Sequence[Run]) -> None:
    """Raises what `write_report` says about `output`."""
    if output.is_dir():
        raise IsADirectoryError(f"The report cannot be written to {output}, which is a directory: name a file in it.")
    if any(output.exists() and output.samefile(run.path) for run in runs):
        raise ValueError(f"The report would overwrite {output}, the log of one of its runs: choose another name.")
    try:
        _folder(output).mkdir(parents=True, exist_ok=True)
        draft = _draft(output)
        draft.write_bytes(b"")
        draft.unlink()
    except OSError as error:
        raise OSError(
            f"The report cannot be written to {output} ({error.strerror}): choose a directory that you may write to."
        ) from error


def _draw_sections(
    questions: Sequence[Question], logged: set[str], facets: Sequence[Facet], curves: Curves
) -> list[Section]:
    """The questions that the runs have an answer to, with its pictures."""
    sections: list[Section] = []
    for question in questions:
        number = len(sections) + 1
        drawn = [
            (plot.name, to_png(draw_plot(plot)), describe_plot(plot)) for plot in plots_of(question, facets, curves)
        ]
        if question.about_seconds:
            drawn = [(bars.title, to_png(draw_bars(bars)), describe_bars(bars)) for bars in bars_of(facets)]
        files = _file_names(number, [name for name, _, _ in drawn])
        pictures = tuple(Picture(file, png, text) for file, (_, png, text) in zip(files, drawn, strict=True))
        if pictures:
            sections.append(Section(question, pictures, tuple(name for name in question.metrics if name in logged)))
    return sections


def _file_names(number: int, names: Sequence[str]) -> list[str]:
    """Different ones, of what every file system takes."""
    files: list[str] = []
    for name in names:
        stem = f"{number:02d}-{re.sub(r'[^a-z0-9_]+', '-', name.lower()).strip('-')[:LONGEST_NAME]}"
        again = sum(re.fullmatch(rf"{stem}(-again\d+)?\.png", file) is not None for file in files)
        files.append(f"{stem}-again{again}.png" if again else f"{stem}.png")
    return files


def _write_pictures(folder: Path, sections: Sequence[Section]) -> tuple[Path, ...]:
    places = []
    for section in sections:
        for picture in section.pictures:
            places.append(folder / picture.file)
            _replace(places[-1], picture.png)
    for earlier in folder.iterdir():
        if PICTURE_FILE.fullmatch(earlier.name) and earlier not in places:
            earlier.unlink()
    return tuple(places)


def _folder(output: Path) -> Path:
    return output.with_name(f"{output.stem}-pictures")


def _replace(place: Path, content: bytes) -> None:
    """Write a file so that whoever opens it meanwhile sees the old content or the new one, and never a part."""
    draft = _draft(place)
    draft.write_bytes(content)
    os.replace(draft, place)


def _draft(place: Path) -> Path:
    return place.with_name(f".{place.name}.tmp")
