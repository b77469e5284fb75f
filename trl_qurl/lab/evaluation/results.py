"""Graded answers, the results computed from them, and a table of the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING

from trl_qurl.lab.comparison import new_table
from trl_qurl.lab.evaluation.scores import Estimate, average_at_k, paired_difference

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Answers:
    """The graded answers to a question: one object of an answer file."""

    task: str
    question: int  # index, from 0
    texts: list[str]
    correct: list[bool]
    tokens: list[int]
    finished: list[bool]  # ended with a stop token, not at the token limit


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


def summarize(answers: Mapping[str, Sequence[Answers]]) -> list[Result]:
    """Compute the results of every task from the answers of each format.

    Differences are from the first format.
    """
    results = []
    first = next(iter(answers.values()))
    for task in dict.fromkeys(row.task for row in first):
        expected = [row.correct for row in first if row.task == task]
        for label, graded in answers.items():
            rows = [row for row in graded if row.task == task]
            correct = [row.correct for row in rows]
            difference = None
            if graded is not first:
                difference = paired_difference(correct, expected)
            results.append(
                Result(
                    task,
                    label,
                    questions=len(rows),
                    accuracy=average_at_k(correct),
                    difference=difference,
                    tokens=fmean(chain.from_iterable(row.tokens for row in rows)),
                    finished=fmean(chain.from_iterable(row.finished for row in rows)),
                )
            )
    return results


def build_table(results: Sequence[Result], model: str) -> Table:
    """Build a table in percent, with 95 % intervals in brackets, within 100 columns."""
    caption = "%, with 95 % intervals; difference from the first format"
    figures = ("right", "difference", "tokens", "cut off")
    table = new_table(model, caption, ("task", "format"), figures)
    for result in results:
        title = f"{result.task} ({result.questions})"
        difference = ""
        if result.difference is not None:  # not the first format
            title = ""
            difference = _with_interval(result.difference, "+.1f")
        table.add_row(
            title,
            result.format,
            _with_interval(result.accuracy, ".1f"),
            difference,
            f"{result.tokens:.0f}",
            f"{100 * (1 - result.finished):.1f}",
        )
    return table


def _with_interval(estimate: Estimate, spec: str) -> str:
    value = format(100 * estimate.value, spec)
    low = format(100 * estimate.low, spec)
    high = format(100 * estimate.high, spec)
    return f"{value} [{low}, {high}]"
