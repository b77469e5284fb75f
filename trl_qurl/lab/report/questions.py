"""What a report asks of runs: the paper's figures and a few more, each with the metrics that answer it.

The questions themselves are data, in `questions.yaml`; `docs/metrics.md` says how each metric is computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.resources import files
from typing import Any, NamedTuple

import yaml


class Measure(NamedTuple):
    """A metric and its name in a title or a legend."""

    metric: str
    label: str


class Panel(NamedTuple):
    """Measures in one unit. They share a plot where there is one group of runs; else each has a plot of its own.

    Attributes:
        title: Of the shared plot.
        unit: Of the vertical axis.
        measures: What is drawn.
        log: The vertical axis is logarithmic; what is not above zero is not drawn.
        percent: Values are shares, written as percentages.
        from_zero: The vertical axis starts at zero.
        at_least: The vertical axis starts no lower than this.
        largest: Smoothed by the largest value instead of the mean.
    """

    title: str
    unit: str
    measures: tuple[Measure, ...]
    log: bool = False
    percent: bool = False
    from_zero: bool = False
    at_least: float | None = None
    largest: bool = False


class Question(NamedTuple):
    """One section of a report.

    Attributes:
        name: Of its figures' files.
        title: The question.
        shows: What the plots show.
        healthy: What they show of a healthy run.
        paper: The figure of the paper that it corresponds to, if there is one.
        panels: Its plots; without any, it is answered by bars of seconds.
    """

    name: str
    title: str
    shows: str
    healthy: str
    paper: str = ""
    panels: tuple[Panel, ...] = ()


REWARD = Measure("reward", "Reward of the rollouts")
REGION_CLIPPED = Measure("clip_ratio/region_mean", "Clipped on either side")
KL = Measure("mismatch/kl_k3", "KL(behavior ‖ proximal)")
LARGEST_RATIO = Measure("mismatch/ratio_max", "Largest ratio ρ of a rollout")
EXPLAINED = Measure("critic/explained_variance", "Explained variance")
DEMO_SCORES = (
    Measure("expected_accuracy", "Expected accuracy, held out"),
    Measure("greedy_accuracy", "Greedy accuracy, held out"),
)

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
    scores = (*DEMO_SCORES, *held_out_scores(metrics))
    return [learning._replace(panels=(reward, held_out._replace(measures=scores))), *others]


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


def _load() -> tuple[Question, ...]:
    entries = yaml.safe_load(files(__package__).joinpath("questions.yaml").read_text(encoding="utf-8"))
    return tuple(
        Question(**{**entry, "panels": tuple(_panel(**panel) for panel in entry.get("panels", ()))})
        for entry in entries
    )


def _panel(measures: dict[str, str], **fields: Any) -> Panel:
    return Panel(measures=tuple(Measure(*measure) for measure in measures.items()), **fields)


QUESTIONS = _load()
"""In the order of a report."""
