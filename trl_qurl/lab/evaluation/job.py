"""What one process of an evaluation is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_qurl.lab.evaluation.answers import GREEDY, SAMPLED, Request
from trl_qurl.lab.evaluation.tasks import Task


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn.

    Attributes:
        samples: Sampled answers per question (k); 0 for none.
        greedy: Whether each question also gets a greedy answer.
        temperature: Of the sampled answers.
        top_p: Probability mass that they are drawn from.
        max_tokens: Longest completion.
        seed: Every answer has a seed of its own, derived from this one, so that it does not depend on the others.
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
                f"samples={self.samples} with greedy={self.greedy} asks for no answer: give a positive number of "
                "samples, or keep the greedy answer."
            )
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature}: give a positive one; greedy answers do not use it.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1 (the paper's is 0.7).")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: give a positive number of tokens.")

    def requests(self, task: Task) -> dict[str, list[Request]]:
        """The answers wanted for a task, by mode."""
        counts = {mode: count for mode, count in ((GREEDY, int(self.greedy)), (SAMPLED, self.samples)) if count}
        questions = range(len(task.prompts))
        return {
            mode: [Request(task.name, mode, question, sample) for question in questions for sample in range(count)]
            for mode, count in counts.items()
        }


@dataclass(frozen=True)
class Job:
    """Evaluate one checkpoint."""

    label: str  # of the number format, for progress bars
    model: str  # directory of the checkpoint that vLLM loads
    tasks: list[Task]
    sampling: Sampling
    answers: Path  # file for the answers
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # of `vllm.LLM`

    @property
    def requests(self) -> list[tuple[Task, str, list[Request]]]:
        """All answers wanted, by task and mode."""
        return [
            (task, mode, requests) for task in self.tasks for mode, requests in self.sampling.requests(task).items()
        ]
