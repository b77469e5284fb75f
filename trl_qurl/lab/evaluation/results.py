"""The results of an evaluation, and a table of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from trl_qurl.lab.evaluation.answers import GREEDY, Answer, AnswerFile, correct_by_question
from trl_qurl.lab.evaluation.job import Sampling
from trl_qurl.lab.evaluation.scores import Estimate, average_at_k, paired_difference, pass_at_k
from trl_qurl.lab.evaluation.tasks import Task

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Mode:
    """Results of greedy or of sampled answers."""

    average: Estimate  # Avg@k; Avg@1 for greedy answers
    pass_at: dict[int, float]  # pass@k of the sampled answers, by k
    difference: Estimate | None  # from the first format's `average`, paired by question
    tokens: float  # mean length of an answer
    finished: float  # share of answers that ended before the token limit
    seconds: float  # total time
    tokens_per_second: float


@dataclass(frozen=True)
class Result:
    """Results of one task in one format."""

    task: str
    format: str
    questions: int
    modes: dict[str, Mode]


def summarize(files: Mapping[str, AnswerFile], tasks: Sequence[Task], sampling: Sampling) -> list[Result]:
    """Compute the results of every task in every format; differences are from the first format."""
    (_, first), *_ = files.items()
    results = []
    for task, (label, file) in product(tasks, files.items()):
        modes = {
            mode: count(file.of(task.name, mode), None if file is first else first.of(task.name, mode))
            for mode in sampling.requests(task)
        }
        results.append(Result(task.name, label, len(task.prompts), modes))
    return results


def count(answers: Sequence[Answer], baseline: Sequence[Answer] | None) -> Mode:
    """Compute the results of one mode's answers."""
    right = correct_by_question(answers)
    samples = min(map(len, right))
    powers = [k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256) if k < samples]
    tokens, seconds = sum(answer.tokens for answer in answers), sum(answer.seconds for answer in answers)
    return Mode(
        average=average_at_k(right),
        pass_at={k: pass_at_k(right, k) for k in [*powers, samples]} if samples > 1 else {},
        difference=None if baseline is None else paired_difference(right, correct_by_question(baseline)),
        tokens=tokens / len(answers),
        finished=sum(answer.finished for answer in answers) / len(answers),
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else 0.0,
    )


def build_table(results: Sequence[Result], model: str) -> Table:
    """Build a table in percent, with 95 % intervals in brackets, within 100 columns."""
    from rich import box
    from rich.table import Table

    several = len({result.format for result in results}) > 1
    caption = "%, with 95 % intervals" + ("; difference from the first format" if several else "")
    table = Table(
        title=model, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption=caption, caption_justify="left"
    )
    for heading in ("task", "format", "answers"):
        table.add_column(heading, no_wrap=True, min_width=max(len(heading), 6))
    for heading in ["right", *(["difference"] if several else []), "pass@k", "tokens", "cut off", "s"]:
        table.add_column(heading, justify="right", min_width=len(heading))
    previous_task = ""
    for result in results:
        for mode, figures in result.modes.items():
            k = max(figures.pass_at, default=1)
            difference = "" if figures.difference is None else _with_interval(figures.difference, "+.1f")
            table.add_row(
                "" if result.task == previous_task else f"{result.task} ({result.questions})",
                result.format,
                "greedy" if mode == GREEDY else f"Avg@{k}",
                _with_interval(figures.average, ".1f"),
                *([difference] if several else []),
                f"{100 * figures.pass_at[k]:.1f}" if figures.pass_at else "",
                f"{figures.tokens:.0f}",
                f"{100 * (1 - figures.finished):.1f}",
                f"{figures.seconds:.0f}",
            )
            previous_task = result.task
    return table


def _with_interval(estimate: Estimate, spec: str) -> str:
    value, low, high = (format(100 * share, spec) for share in (estimate.value, estimate.low, estimate.high))
    return f"{value} [{low}, {high}]"
