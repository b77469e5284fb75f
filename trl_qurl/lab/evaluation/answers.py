"""Graded answers on disk, one per line, so that an interrupted evaluation continues where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

GREEDY = "greedy"
SAMPLED = "sampled"


@dataclass(frozen=True)
class Request:
    """One answer that is wanted."""

    task: str
    mode: str  # GREEDY or SAMPLED
    question: int  # from 0
    sample: int  # which of the answers to it, from 0


@dataclass(frozen=True)
class Answer:
    """An answer that was given and graded."""

    request: Request
    correct: bool
    tokens: int
    finished: bool  # by itself, and not at the limit of tokens
    seconds: float  # since the previous answer of the same process; their sum is the time of the whole
    text: str


class AnswerFile:
    """Answers in the order in which they came.

    A line that was cut off when its process was killed is dropped, and its answer generated again. Any other broken
    line, or an answer that is there twice, is an error: something else wrote to the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[Request, Answer] = {}
        if path.exists():
            self._read()

    def add(self, answer: Answer) -> None:
        """Write an answer; when this returns, it survives the end of this process."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(answer)) + "\n")
        self.answers[answer.request] = answer

    def missing(self, requests: Iterable[Request]) -> list[Request]:
        """Those of the requests that have no answer yet."""
        return [request for request in requests if request not in self.answers]

    def of(self, task: str, mode: str) -> list[Answer]:
        """All answers of one kind."""
        return [answer for request, answer in self.answers.items() if (request.task, request.mode) == (task, mode)]

    def _read(self) -> None:
        lines = self.path.read_bytes().splitlines(keepends=True)
        whole = 0
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                content = json.loads(line)
                answer = Answer(**{**content, "request": Request(**content["request"])})
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"Line {number} of {self.path} is not an answer ({error}): move the file away to start again."
                ) from error
            if answer.request in self.answers:
                raise ValueError(f"Line {number} of {self.path} answers {answer.request} for the second time.")
            self.answers[answer.request] = answer
            whole += len(line)
        if whole < self.path.stat().st_size:
            os.truncate(self.path, whole)


def graded(answers: Iterable[Answer]) -> list[list[bool]]:
    """Whether each answer is right, by question and sample, (Q, k)."""
    by_question: dict[int, dict[int, bool]] = {}
    for answer in answers:
        by_question.setdefault(answer.request.question, {})[answer.request.sample] = answer.correct
    return [[right for _, right in sorted(samples.items())] for _, samples in sorted(by_question.items())]
