"""The page: everything a reader sees but the pictures themselves, filled into `template.html`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from trl_qurl.lab.report.curves import FINAL_ROLLOUTS, updates_per_rollout
from trl_qurl.lab.report.groups import Group
from trl_qurl.lab.report.labels import shown
from trl_qurl.lab.report.questions import Question
from trl_qurl.lab.report.settings import common, flatten, origins, set_aside
from trl_qurl.lab.report.summary import LONGEST_IN_TABLE, Table

TEMPLATE = "template.html"


@dataclass(frozen=True)
class Picture:
    """One picture of the page.

    Attributes:
        file: its name beside the page.
        png: its content.
        description: what it shows, in words and numbers.
    """

    file: str
    png: bytes
    description: str

    @property
    def source(self) -> str:
        """The content as an address, so that the page needs no other file."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode('ascii')}"

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, which a PNG file has from its 17th byte on."""
        return int.from_bytes(self.png[16:20], "big"), int.from_bytes(self.png[20:24], "big")


@dataclass(frozen=True)
class Section:
    """A question, the pictures that answer it, and the metrics that are drawn."""

    question: Question
    pictures: tuple[Picture, ...]
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class Content:
    """What a report says.

    Attributes:
        groups: of runs.
        summary: the table at the top.
        differences: the table of settings.
        sections: questions with pictures.
        unanswered: names of the questions about which nothing was logged.
        notes: what was left out or could be misread.
        window: rollouts over which curves are smoothed.
    """

    groups: Sequence[Group]
    summary: Table
    differences: Table
    sections: Sequence[Section]
    unanswered: Sequence[str]
    notes: Sequence[str]
    window: int


def render_page(content: Content) -> str:
    """The HTML of a report."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8"))
    runs = [run for group in content.groups for run in group.runs]
    settings = [flatten(run.settings) for run in runs]
    return template.render(
        content=content,
        title=_title(content.groups),
        final=FINAL_ROLLOUTS,
        runs=[_run_row(group, index) for group in content.groups for index in range(len(group.runs))],
        updates=_updates_text([updates_per_rollout(run) for run in runs]),
        several_seeds=any(len(group.runs) > 1 for group in content.groups),
        uneven=[group.label for group in content.groups if _is_uneven(group)],
        common=[(name, shown(value, LONGEST_IN_TABLE)) for name, value in sorted(common(settings).items())],
        set_aside=sorted(set_aside(settings)),
        origins=origins(settings),
    )


def _title(groups: Sequence[Group]) -> str:
    count = sum(len(group.runs) for group in groups)
    if len(groups) == 1 and groups[0].wordings:
        return f"{groups[0].label}: {_counted(count, 'run')}"
    return f"{_counted(count, 'run')} in {_counted(len(groups), 'group')}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _run_row(group: Group, index: int) -> dict[str, Any]:
    run = group.runs[index]
    return {
        "label": group.label,
        "seed": shown(run.settings.get("seed")),
        "path": str(run.path),
        "rows": len(run.rows),
        "last_step": max(row["step"] for row in run.rows),
    }


def _updates_text(updates: Sequence[float | None]) -> str:
    """How steps become rollouts, in a sentence."""
    known = sorted({count for count in updates if count is not None})
    missing = sum(count is None for count in updates)
    text = f"A rollout is {' or '.join(f'{count:g}' for count in known)} optimizer updates." if known else ""
    if missing:
        text += (
            f" {_counted(missing, 'run')} of {len(updates)} did not record updates_per_rollout: a step counts as one."
        )
    return text.strip()


def _is_uneven(group: Group) -> bool:
    return len({max(row["step"] for row in run.rows) for run in group.runs}) > 1
