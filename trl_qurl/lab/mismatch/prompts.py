"""Prompts: the user's questions, or the built-in ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BUILT_IN = (
    "Natalia sold 48 clips in April and half as many in May. How many did she sell altogether?",
    "A train leaves at 9:40 and arrives at 13:25. How long does the journey take?",
    "What is the sum of the first twenty odd numbers?",
    "A shop takes 15 % off a coat that costs 80 dollars. What does it cost then?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a lighthouse.",
    "List three differences between a frog and a toad.",
    "Summarize the story of Romeo and Juliet in one paragraph.",
    "Write a Python function that reverses the words of a sentence.",
    "What does the SQL statement SELECT COUNT(*) FROM orders WHERE paid = 1 return?",
    "Translate into French: The library opens at ten o'clock.",
    "Give me a recipe for pancakes with four ingredients.",
    "Who wrote the first computer program, and what was it for?",
    "My phone does not charge any more. What should I check first?",
    "If all roses are flowers and some flowers fade quickly, do some roses fade quickly?",
    "Name the planets of the solar system in the order of their distance from the sun.",
)
"""Arithmetic, language, code and knowledge, so no single kind of text dominates."""


def load_prompts(source: str | None, limit: int) -> list[Any]:
    """Load the first `limit` prompts of a source: conversations, or the lines of a `.txt` file.

    A source is `None` for the built-in prompts, a `.txt` file, or a task of `trl-qurl eval`. Raises
    `FileNotFoundError`, or `ValueError` if it contains no prompts or cannot be parsed.
    """
    if source is None:
        return [[{"role": "user", "content": text}] for text in BUILT_IN[:limit]]
    if not source.endswith(".txt"):
        from trl_qurl.lab.evaluation.tasks import load_tasks

        [task] = load_tasks([source], limit, needs_answers=False)
        return task.prompts
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"{source} does not exist: give a file with one prompt per line.")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{source} contains no prompts: write one per line.")
    return lines[:limit]
