"""Tasks for a small chat model whose answers a few lines of Python can check, with questions that are held out.

Prompts are short and carry a system message of their own: the template's default message would take a third of the
tokens of a step.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from trl_qurl.lab.demo.chat import is_right, questions

Messages = list[dict[str, str]]


class Task(NamedTuple):
    """What is asked, and what a right answer is worth.

    Attributes:
        learned: Questions to train on, as messages with the answer to check for.
        held_out: Questions that are never trained on.
        reward: Reward of a completion's text, given the answer, from 0 to 1.
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


TOPICS = """\
rivers; the moon; bread; bicycles; winter; libraries; the sea; coffee; trains; old houses; music;
gardens; mountains; rain; horses; bridges; glass; honey; maps; clocks; forests; islands; cheese;
football; deserts; paper; whales; kites; castles; tea; volcanoes; shoes; apples; airplanes; owls; chess;
ice; markets; lighthouses; spiders; salt; trees; windows; dogs; wheat; caves; violins; snow; bees;
schools; stars; boats; onions; tigers; candles; radio; roads; wool; butterflies; sand; rice; wolves;
paintings; gold""".replace("\n", " ").split("; ")
FACTS, WORDS = 5, 12
NUMBERED = re.compile(r"^(\d+)\. (.*)$", re.MULTILINE)


def facts(held_out: bool) -> list[tuple[Messages, None]]:
    """Five numbered facts of at least a dozen words each: answers of about a hundred tokens."""
    system = {"role": "system", "content": "You are an AI."}
    request = f"List {FACTS} facts about {{}}, numbered 1 to {FACTS}. Each has at least {WORDS} words."
    return [
        ([system, {"role": "user", "content": request.format(topic)}], None)
        for number, topic in enumerate(TOPICS)
        if (number % 4 == 0) == held_out
    ]


def facts_reward(text: str, _: None = None) -> float:
    """The share of the facts that are there: in their places, long enough, and none too many."""
    found = [(int(number), len(fact.split())) for number, fact in NUMBERED.findall(text.strip())]
    good = sum(number == place and words >= WORDS for place, (number, words) in enumerate(found, start=1))
    return good / FACTS if len(found) <= FACTS else 0.0


TASKS = {
    "arithmetic": Task(
        learned=arithmetic(held_out=False),
        held_out=arithmetic(held_out=True),
        reward=lambda text, answer: float(is_right(text, answer)),
        longest=16,
        learning_rate=1e-5,
    ),
    "facts": Task(
        learned=facts(held_out=False),
        held_out=facts(held_out=True),
        reward=facts_reward,
        longest=160,
        learning_rate=1e-5,
    ),
}
