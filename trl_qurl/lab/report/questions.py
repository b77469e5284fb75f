"""The questions of a report: the paper's figures and a few more, each with the metrics that answer it.

The questions are data, in `questions.yaml`; `docs/metrics.md` explains how each metric is computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import yaml


class Measure(NamedTuple):
    """A metric and its label in titles and legends."""

    metric: str
    label: str


class Panel(NamedTuple):
    """Measures in one unit. A single group of runs shares one plot; several groups get one plot per measure."""

    title: str  # title of the shared plot
    unit: str  # label of the vertical axis
    measures: tuple[Measure, ...]
    log: bool = False  # use a logarithmic vertical axis, without values ≤ 0
    percent: bool = False  # format shares as percentages
    from_zero: bool = False  # start the vertical axis at zero
    at_least: float | None = None  # minimum lower limit of the vertical axis
    largest: bool = False  # smooth with the maximum instead of the mean


class Question(NamedTuple):
    """One section of a report."""

    name: str  # name in the list of questions without logged metrics
    title: str  # the question
    shows: str  # description of the plots
    healthy: str  # what to expect from a healthy run
    paper: str = ""  # corresponding figure in the paper
    panels: tuple[Panel, ...] = ()  # if empty, the section has bars of seconds


ABOUT_EVALUATION = re.compile(
    r"eval_(loss|runtime|model_preparation_time|.*_per_second|.*/seconds|.*_(tokens|finished))$"
)
"""Metrics that are not scores, from evaluations of transformers and of `TaskEvaluationCallback`."""

TASK_SCORE = re.compile(r"(.+)/(actor|policy)_avg@1$")
MEAN_REWARD = re.compile(r"reward$|rewards/.*/mean$")


def ask(metrics: Iterable[str]) -> list[Question]:
    """Adapt `QUESTIONS` to the logged metrics by adding their held-out scores to the first question."""
    learning, *others = QUESTIONS
    reward, held_out = learning.panels
    held_out = held_out._replace(measures=(*held_out.measures, *held_out_scores(metrics)))
    return [learning._replace(panels=(reward, held_out)), *others]


def held_out_scores(metrics: Iterable[str]) -> list[Measure]:
    """Return the logged scores of evaluations (`eval_*`), without their own statistics and per-rollout metrics."""
    names = set(metrics)
    scores = []
    for name in sorted(name for name in names if name.startswith("eval_") and not ABOUT_EVALUATION.match(name)):
        rest = name.removeprefix("eval_")
        if task := TASK_SCORE.match(rest):
            scores.append(Measure(name, task.expand(r"\1, answered by the \2")))
        elif rest not in names or MEAN_REWARD.match(rest):
            scores.append(Measure(name, f"{rest}, held out"))
    return scores


def _question(panels: Sequence[dict[str, Any]] = (), **fields: str) -> Question:
    parsed = (Panel(**{**panel, "measures": tuple(map(Measure._make, panel["measures"].items()))}) for panel in panels)
    return Question(panels=tuple(parsed), **fields)


_CONTENT = files(__package__).joinpath("questions.yaml").read_text(encoding="utf-8")
QUESTIONS = tuple(_question(**entry) for entry in yaml.safe_load(_CONTENT))
"""All questions, in report order."""

MEASURES = {
    measure.metric: measure for question in QUESTIONS for panel in question.panels for measure in panel.measures
}
"""Measures by metric name."""
