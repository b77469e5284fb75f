"""What a report asks of runs: the paper's figures and a few more, each with the metrics that answer it.

The questions themselves are data, in `questions.yaml`; `docs/metrics.md` says how each metric is computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import yaml


class Measure(NamedTuple):
    """A metric and its name in a title or a legend."""

    metric: str
    label: str


class Panel(NamedTuple):
    """Measures in one unit. They share a plot where there is one group of runs; else each has a plot of its own."""

    title: str  # of the shared plot
    unit: str  # of the vertical axis
    measures: tuple[Measure, ...]
    log: bool = False  # the vertical axis is logarithmic; what is not above zero is not drawn
    percent: bool = False  # values are shares, written as percentages
    from_zero: bool = False  # the vertical axis starts at zero
    at_least: float | None = None  # the vertical axis starts no lower than this
    largest: bool = False  # smoothed by the largest value instead of the mean


class Question(NamedTuple):
    """One section of a report."""

    name: str  # in the list of what was not logged
    title: str  # the question itself
    shows: str  # what the plots show
    healthy: str  # what they show of a healthy run
    paper: str = ""  # the figure of the paper that it corresponds to
    panels: tuple[Panel, ...] = ()  # without any, it is answered by bars of seconds


ABOUT_EVALUATION = re.compile(
    r"eval_(loss|runtime|model_preparation_time|.*_per_second|.*/seconds|.*_(tokens|finished))$"
)
"""What evaluations log about themselves: those of transformers, and `TaskEvaluationCallback`."""

TASK_SCORE = re.compile(r"(.+)/(actor|policy)_avg@1$")
MEAN_REWARD = re.compile(r"reward$|rewards/.*/mean$")


def ask(metrics: Iterable[str]) -> list[Question]:
    """Adapt `QUESTIONS` to runs that logged these metrics: the held-out scores among them join the first question."""
    learning, *others = QUESTIONS
    reward, held_out = learning.panels
    held_out = held_out._replace(measures=(*held_out.measures, *held_out_scores(metrics)))
    return [learning._replace(panels=(reward, held_out)), *others]


def held_out_scores(metrics: Iterable[str]) -> list[Measure]:
    """What evaluations logged (`eval_*`), except what they log about themselves or about every rollout."""
    names = set(metrics)
    found = []
    for name in sorted(name for name in names if name.startswith("eval_") and not ABOUT_EVALUATION.match(name)):
        rest = name.removeprefix("eval_")
        if task := TASK_SCORE.match(rest):
            found.append(Measure(name, task.expand(r"\1, answered by the \2")))
        elif rest not in names or MEAN_REWARD.match(rest):
            found.append(Measure(name, f"{rest}, held out"))
    return found


def _question(panels: Sequence[dict[str, Any]] = (), **fields: str) -> Question:
    drawn = (Panel(**{**panel, "measures": tuple(map(Measure._make, panel["measures"].items()))}) for panel in panels)
    return Question(panels=tuple(drawn), **fields)


_CONTENT = files(__package__).joinpath("questions.yaml").read_text(encoding="utf-8")
QUESTIONS = tuple(_question(**entry) for entry in yaml.safe_load(_CONTENT))
"""In the order of a report."""

MEASURES = {
    measure.metric: measure for question in QUESTIONS for panel in question.panels for measure in panel.measures
}
"""By the name of the metric."""
