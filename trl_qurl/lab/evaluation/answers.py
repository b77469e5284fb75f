"""Graded answers on disk, one per line, so an interrupted evaluation can resume."""

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
    """A request for one answer."""

    task: str
    mode: str  # GREEDY or SAMPLED
    question: int  # index, from 0
    sample: int  # index among the answers to the question, from 0


@dataclass(frozen=True)
class Answer:
    """A graded answer."""

    request: Request
    correct: bool
    tokens: int
    finished: bool  # ended with a stop token, not at the token limit
    seconds: float  # since the previous answer of the same process; they add up to the total time
    text: str


class AnswerFile:
    """Append-only file of answers, in order of arrival.

    A last line cut off by a killed process is dropped, and its answer generated again. Any other malformed line or
    duplicate answer is an error, because something else must have written to the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[Request, Answer] = {}
        if path.exists():
            self._read()

    def add(self, answer: Answer) -> None:
        """Append an answer; once this returns, the answer survives the end of this process."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(answer)) + "\n")
        self.answers[answer.request] = answer

    def missing(self, requests: Iterable[Request]) -> list[Request]:
        """Return the requests that do not have an answer yet."""
        return [request for request in requests if request not in self.answers]

    def of(self, task: str, mode: str) -> list[Answer]:
        """Return all answers for a task and mode."""
        return [answer for request, answer in self.answers.items() if (request.task, request.mode) == (task, mode)]

    def _read(self) -> None:
        lines = self.path.read_bytes().splitlines(keepends=True)
        complete = 0  # bytes
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                content = json.loads(line)
                answer = Answer(**{**content, "request": Request(**content["request"])})
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"Line {number} of {self.path} is not a valid answer ({error}): move the file away to start over."
                ) from error
            if answer.request in self.answers:
                raise ValueError(f"Line {number} of {self.path} duplicates the answer to {answer.request}.")
            self.answers[answer.request] = answer
            complete += len(line)
        if complete < self.path.stat().st_size:
            os.truncate(self.path, complete)


def correct_by_question(answers: Iterable[Answer]) -> list[list[bool]]:
    """Return the correctness of each answer, by question and sample, (Q, k)."""
    by_question: dict[int, dict[int, bool]] = {}
    for answer in answers:
        by_question.setdefault(answer.request.question, {})[answer.request.sample] = answer.correct
    return [[right for _, right in sorted(samples.items())] for _, samples in sorted(by_question.items())]
