"""Tasks for a small chat model whose answers a few lines of Python can check, with questions that are held out.

Prompts are short and carry a system message of their own: the template's default message would take a third of the
tokens of a step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from trl_qurl.lab.demo.chat import is_right, questions

Messages = list[dict[str, str]]


class Task(NamedTuple):
    """What is asked, and what a right answer is worth.

    Attributes:
        learned: Questions to train on, as messages with the answer to check for.
        held_out: Questions that are never trained on.
        reward: Reward of a completion's text, given the answer: 0 or 1.
        longest: Tokens of a completion at most.
        learning_rate: That of every arm, found with BF16 rollouts.
        completions: Completions of one rollout.
        updates: Optimizer updates from one rollout.
        samples: Answers to each held-out question from which accuracy is measured.
    """

    learned: list[tuple[Messages, Any]]
    held_out: list[tuple[Messages, Any]]
    reward: Callable[[str, Any], float]
    longest: int
    learning_rate: float
    completions: int = 32
    updates: int = 4
    samples: int = 8


def arithmetic(held_out: bool) -> list[tuple[Messages, int]]:
    """One-digit multiplication and addition: the questions of `trl-qurl demo --model`."""
    system = {"role": "system", "content": "You are an AI. Reply with the number only."}
    return [([system, {"role": "user", "content": asked.text}], asked.answer) for asked in questions(held_out)]


TASKS = {
    "arithmetic": Task(
        learned=arithmetic(held_out=False),
        held_out=arithmetic(held_out=True),
        reward=lambda text, answer: float(is_right(text, answer)),
        longest=16,
        learning_rate=1e-5,
    ),
}
