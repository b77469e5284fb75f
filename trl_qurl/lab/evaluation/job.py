"""What one process of an evaluation is asked to do, as data that fit into a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trl_qurl.lab.evaluation.answers import GREEDY, SAMPLED, Request
from trl_qurl.lab.evaluation.tasks import Task


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn.

    Attributes:
        samples: k, sampled answers per question; 0 for none.
        greedy: whether each question also gets a greedy answer.
        temperature: of the sampled ones.
        top_p: share of the probability they are drawn from.
        max_tokens: longest completion.
        seed: every answer has a seed of its own, made from this one, so that none depends on what else is generated.
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
                "samples, or leave the greedy answer in."
            )
        if not self.temperature > 0:
            raise ValueError(
                f"temperature={self.temperature}: give a positive one; greedy answers come by themselves."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie above 0 and up to 1 (the paper's is 0.7).")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: give a positive number of tokens.")

    def requests(self, task: Task) -> Iterator[tuple[str, list[Request]]]:
        """The answers wanted for a task, by mode."""
        questions = range(len(task.prompts))
        if self.greedy:
            yield GREEDY, [Request(task.name, GREEDY, question, 0) for question in questions]
        if self.samples:
            requests = [Request(task.name, SAMPLED, q, sample) for q in questions for sample in range(self.samples)]
            yield SAMPLED, requests


@dataclass(frozen=True)
class Job:
    """Evaluate one checkpoint.

    Attributes:
        label: of the number format, for progress bars.
        model: directory of the checkpoint that vLLM loads.
        tasks: as for `load_tasks`.
        limit: of questions per task.
        sampling: how answers are drawn.
        answers: file that they go to.
        engine_kwargs: further arguments of `vllm.LLM`.
    """

    label: str
    model: str
    tasks: list[str]
    limit: int | None
    sampling: Sampling
    answers: str
    engine_kwargs: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the job for another process."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read what `write` wrote."""
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**content, "sampling": Sampling(**content["sampling"])})
