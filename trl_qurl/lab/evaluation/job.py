"""Sampling settings, and the job of one evaluation process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_qurl.lab.evaluation.answers import GREEDY, SAMPLED, Request
from trl_qurl.lab.evaluation.tasks import Task


@dataclass(frozen=True)
class Sampling:
    """Number of answers and sampling settings.

    Attributes:
        samples: Sampled answers per question (k); 0 for none.
        greedy: Also generate a greedy answer to each question.
        temperature: Sampling temperature.
        top_p: Probability mass to sample from.
        max_tokens: Longest completion, in tokens.
        seed: Each answer derives a separate seed from this one, so it does not depend on the other answers.
    """

    samples: int = 0
    greedy: bool = True
    temperature: float = 1.0
    top_p: float = 0.7
    max_tokens: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 0 or (self.samples == 0 and not self.greedy):
            raise ValueError(
                f"samples={self.samples} with greedy={self.greedy} requests no answers: give a positive number of "
                "samples, or keep the greedy answer."
            )
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be positive; greedy answers do not use it.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1 (the paper uses 0.7).")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: give a positive number of tokens.")

    def requests(self, task: Task) -> dict[str, list[Request]]:
        """Return the requests for a task, by mode."""
        counts = {mode: count for mode, count in ((GREEDY, int(self.greedy)), (SAMPLED, self.samples)) if count}
        questions = range(len(task.prompts))
        return {
            mode: [Request(task.name, mode, question, sample) for question in questions for sample in range(count)]
            for mode, count in counts.items()
        }


@dataclass(frozen=True)
class Job:
    """Evaluation of one checkpoint."""

    label: str  # number format, for progress bars
    model: str  # directory of the checkpoint that vLLM loads
    tasks: list[Task]
    sampling: Sampling
    answers: Path  # file for the answers
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # for `vllm.LLM`

    @property
    def requests(self) -> list[tuple[Task, str, list[Request]]]:
        """All requests, by task and mode."""
        return [
            (task, mode, requests) for task in self.tasks for mode, requests in self.sampling.requests(task).items()
        ]
