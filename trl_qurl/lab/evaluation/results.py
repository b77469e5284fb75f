"""Graded answers, the results computed from them, and a table of the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from trl_qurl.lab.comparison import new_table
from trl_qurl.lab.evaluation.scores import Estimate, average_at_k, paired_difference

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Answer:
    """A graded answer: one line of an answer file."""

    task: str
    question: int  # index, from 0
    correct: bool
    tokens: int
    finished: bool  # ended with a stop token, not at the token limit
    text: str


@dataclass(frozen=True)
class Result:
    """Results of one task in one format."""

    task: str
    format: str
    questions: int
    accuracy: Estimate  # Avg@k
    difference: Estimate | None  # from the first format's accuracy, paired by question
    tokens: float  # mean length of an answer
    finished: float  # share of answers that ended before the token limit


def summarize(answers: Mapping[str, Sequence[Answer]]) -> list[Result]:
    """Compute the results of every task from the answers of each format.

    Differences are from the first format.
    """
    baseline = next(iter(answers.values()))
    results = []
    for task in dict.fromkeys(answer.task for answer in baseline):
        expected = _correct_by_question(baseline, task)
        for label, graded in answers.items():
            correct = _correct_by_question(graded, task)
            difference = None
            if graded is not baseline:
                difference = paired_difference(correct, expected)
            own = [answer for answer in graded if answer.task == task]
            results.append(
                Result(
                    task,
                    label,
                    questions=len(correct),
                    accuracy=average_at_k(correct),
                    difference=difference,
                    tokens=fmean(answer.tokens for answer in own),
                    finished=fmean(answer.finished for answer in own),
                )
            )
    return results


def build_table(results: Sequence[Result], model: str) -> Table:
    """Build a table in percent, with 95 % intervals in brackets, within 100 columns."""
    has_differences = any(result.difference for result in results)
    caption = "%, with 95 % intervals"
    figures = ["right", "tokens", "cut off"]
    if has_differences:
        caption += "; difference from the first format"
        figures.insert(1, "difference")
    table = new_table(model, caption, ("task", "format"), figures)
    for result in results:
        is_first = result.format == results[0].format
        cells = [
            f"{result.task} ({result.questions})" if is_first else "",
            result.format,
            _with_interval(result.accuracy, ".1f"),
            f"{result.tokens:.0f}",
            f"{100 * (1 - result.finished):.1f}",
        ]
        if result.difference is not None:
            cells.insert(3, _with_interval(result.difference, "+.1f"))
        elif has_differences:
            cells.insert(3, "")
        table.add_row(*cells)
    return table


def _correct_by_question(answers: Sequence[Answer], task: str) -> list[list[bool]]:
    """Return the correctness of each answer to a task, by question, (Q, k)."""
    correct: dict[int, list[bool]] = {}
    for answer in answers:
        if answer.task == task:
            correct.setdefault(answer.question, []).append(answer.correct)
    return list(correct.values())


def _with_interval(estimate: Estimate, spec: str) -> str:
    value = format(100 * estimate.value, spec)
    low = format(100 * estimate.low, spec)
    high = format(100 * estimate.high, spec)
    return f"{value} [{low}, {high}]"
