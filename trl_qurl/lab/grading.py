r"""What a reference answer is, and which completions are right: mathematics by TRL's reward, all else as text.

As mathematics a word is a product of letters, so `\boxed{Siarp}` would be right for Paris. TRL's own comparison of
`\text{Paris}` knows only unaccented letters.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

BOX = re.compile(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")  # three levels of braces are enough
STYLED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
QUANTITY = re.compile(
    r"(?P<currency>[€£¥]?)\s*(?P<number>[-+]?(?:[\d,]*\.?\d+(?:/\d+)?|\\[dt]?frac\{\d+\}\{\d+\}))\$?"
    # A unit. Not: 2x, 2 x, 2 pi, 2 million, 2 pm.
    r"(?P<unit>\s*[€£¥]|\s*\([^\d\\]*\)"
    r"|\s+(?!(?:pi|sqrt|thousand|million|billion|trillion|dozen|[ap]\.?m\.?|BCE?|AD|CE|and|or)\b)"
    r"(?:[^\W\d_]{2}|[mgshlLNJWVKCF]\b)[^\d\\=+*<>]*(?:\^?[23])?(?:\s*\([^\d\\]*\))?)?"
)
SYMBOLS = re.compile(r"[\\=^_+*<>{}|]")  # of formulas
WORD = re.compile(r"(?<![^\W_])(?!(?:and|or|sin|cos|tan|log|ln|exp|sqrt|pi|mod)\b)[^\W\d_]{2,}")
CODE = re.compile(r"\d+([-/.:])\d+(?:\1\d+)+|\d{1,2}:\d\d|\d{3}-\d{4}")  # a date, time or number of a phone


def as_solution(answer: str) -> str:
    r"""Return the final answer of a text, as a formula with its unit after it, `$18$ dollars`, or as `$\text{Paris}$`.

    The final answer is in the last `\boxed{}`, or follows `####`. Without dollar signs TRL finds numbers, but no
    formulas; inside of them, a unit would be a factor.
    """
    final = (BOX.findall(answer) or [answer.rpartition("####")[2]])[-1].strip(" $\n").rstrip(".")
    plain = STYLED.sub(r"\1", final)
    if quantity := QUANTITY.fullmatch(plain):
        return f"{quantity['currency']}${quantity['number']}${quantity['unit'] or ''}"
    if CODE.fullmatch(plain) or (WORD.search(plain) and not SYMBOLS.search(plain)):
        return f"$\\text{{{plain}}}$"
    return f"${final}$"


def is_text(solution: str) -> bool:
    """Return whether a solution is compared as text alone."""
    return solution.startswith("$\\text{") and solution.endswith("}$")


def accuracy_reward(completions: list[Any], solution: list[str], **kwargs: Any) -> list[float]:
    r"""Reward function: 1 if every `\boxed{}` of a completion, and at least one, holds the solution, else 0.

    It does if both are the same text, ignoring case, styles and punctuation around it, or if TRL's `accuracy_reward`,
    which gets all arguments, says so and the solution is no text.
    """
    from trl.rewards import accuracy_reward as compare_formulas

    formulas = compare_formulas(completions, solution, **kwargs)  # None for a solution that it cannot read
    boxes = [set(map(_normalized, BOX.findall(turns[0]["content"]))) for turns in completions]
    return [
        float(found == {_normalized(right)} or (formula == 1.0 and not is_text(right)))
        for found, right, formula in zip(boxes, solution, formulas, strict=True)
    ]


def _normalized(text: str) -> str:
    text = re.sub(r"\\[ ,;!]|~", " ", STYLED.sub(r"\1", text.replace("$", "")))
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip(" .,;:!?'\"()")
