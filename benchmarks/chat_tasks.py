"""Verifiable tasks for a small chat model, each with held-out questions.

Prompts bring a short system message, because the chat template's default makes them a third longer
(45 instead of 34 tokens for SmolLM2 and `arithmetic`).
"""

import re
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

Messages = list[dict[str, str]]


class Task(NamedTuple):
    """A task and how to train on it.

    Attributes:
        learned: Questions to train on, as messages with the answer to check for.
        held_out: Questions that are never trained on.
        reward: Reward of a completion's text, given the answer, from 0 to 1.
        longest: Maximum tokens of a completion.
        learning_rate: Learning rate of every arm.
        samples: Answers sampled per held-out question to measure accuracy.
    """

    learned: list[tuple[Messages, Any]]
    held_out: list[tuple[Messages, Any]]
    reward: Callable[[str, Any], float]
    longest: int
    learning_rate: float
    samples: int = 8


def arithmetic(held_out: bool) -> list[tuple[Messages, int]]:
    """One-digit multiplication and addition, with digits from 2 to 9."""
    system = {"role": "system", "content": "You are an AI. Reply with the number only."}
    asked = []
    for name, operation in {"times": int.__mul__, "plus": int.__add__}.items():
        for a, b in product(range(2, 10), repeat=2):
            if ((a + 3 * b) % 4 == 0) == held_out:
                question = {"role": "user", "content": f"What is {a} {name} {b}?"}
                asked.append(([system, question], operation(a, b)))
    return asked


def last_number(text: str, answer: int) -> float:
    """Return 1 if the last number is the answer."""
    return float(re.findall(r"\d+", text)[-1:] == [str(answer)])


TOPICS = """\
rivers; the moon; bread; bicycles; winter; libraries; the sea; coffee; trains; old houses; music;
gardens; mountains; rain; horses; bridges; glass; honey; maps; clocks; forests; islands; cheese;
football; deserts; paper; whales; kites; castles; tea; volcanoes; shoes; apples; airplanes; owls;
chess; ice; markets; lighthouses; spiders; salt; trees; windows; dogs; wheat; caves; violins; snow;
bees; schools; stars; boats; onions; tigers; candles; radio; roads; wool; butterflies; sand; rice;
wolves; paintings; gold""".replace("\n", " ").split("; ")
FACTS, WORDS = 5, 12
NUMBERED = re.compile(r"^(\d+)\. (.*)$", re.MULTILINE)


def facts(held_out: bool) -> list[tuple[Messages, None]]:
    """Five numbered facts of at least a dozen words each: answers of about a hundred tokens."""
    system = {"role": "system", "content": "You are an AI."}
    request = (
        f"List {FACTS} facts about {{}}, numbered 1 to {FACTS}. Each has at least {WORDS} words."
    )
    return [
        ([system, {"role": "user", "content": request.format(topic)}], None)
        for number, topic in enumerate(TOPICS)
        if (number % 4 == 0) == held_out
    ]


def facts_reward(text: str, _: None = None) -> float:
    """Return the share of facts that have the right number and length; 0 if there are more than
    `FACTS`.
    """
    listed = [(int(number), len(fact.split())) for number, fact in NUMBERED.findall(text.strip())]
    good = sum(
        number == place and words >= WORDS for place, (number, words) in enumerate(listed, start=1)
    )
    return good / FACTS if len(listed) <= FACTS else 0.0


def calculations(held_out: bool, first: range, before: str = "") -> list[tuple[Messages, int]]:
    """Sums and products for a base model to go on with; such models end no answer by themselves."""
    return [
        # A system message, because Gemma's template writes a new line after a user's.
        (
            [{"role": "system", "content": f"{before}{a} {sign} {b} ="}],
            a + b if sign == "+" else a * b,
        )
        for sign in "+*"
        for a in first
        for b in range(2, 10)
        if ((a + 3 * b) % 4 == 0) == held_out
    ]


def few_shot(held_out: bool) -> list[tuple[Messages, int]]:
    """Sums and products of two digits and one, after an example of each."""
    return calculations(held_out, range(12, 20), "27 + 5 = 32\n23 * 3 = 69\n")


def equations(held_out: bool) -> list[tuple[Messages, int]]:
    """One-digit sums and products without an example: a base model samples four right answers of
    ten.
    """
    return calculations(held_out, range(2, 10))


def first_number(text: str, answer: int) -> float:
    """Return 1 if the first number is the answer."""
    return float(re.findall(r"\d+", text)[:1] == [str(answer)])


TASKS = {
    "arithmetic": Task(
        learned=arithmetic(held_out=False),
        held_out=arithmetic(held_out=True),
        reward=last_number,
        longest=16,
        learning_rate=1e-5,
    ),
    "facts": Task(
        learned=facts(held_out=False),
        held_out=facts(held_out=True),
        reward=facts_reward,
        longest=160,
        learning_rate=2e-5,
    ),
    "few_shot": Task(
        learned=few_shot(held_out=False),
        held_out=few_shot(held_out=True),
        reward=first_number,
        longest=5,
        learning_rate=1e-6,
    ),
    "equations": Task(
        learned=equations(held_out=False),
        held_out=equations(held_out=True),
        reward=first_number,
        longest=5,
        # TRL's; at 1e-5 Gemma 3 270M forgot everything in eight updates of few_shot
        learning_rate=1e-6,
    ),
}
