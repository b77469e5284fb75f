r"""Whether the final answer of a completion is the reference answer, as a careful person would judge.

`extraction` finds the answer in the completion, `notation` gives it one spelling, `structure` takes it apart, `values`
compares numbers and words, `comparison` puts the parts together. What takes mathematics goes to a worker process
(`worker`, `process`) that runs `algebra` on math-verify and can be ended at any time, from any thread. Plain numbers,
which most answers are, never get that far.

Left out: steps and style (only the final answer counts), conversion of units, rounding, and what the question asked
for, which nothing here has read.
"""

from __future__ import annotations

from functools import lru_cache

from trl_qurl.lab.grading.comparison import AlgebraNeededError, ask_for_algebra, equal
from trl_qurl.lab.grading.extraction import final_answer
from trl_qurl.lab.grading.notation import normalized
from trl_qurl.lab.grading.worker import ANSWER_TIMEOUT, OutOfTimeError, compare

__all__ = ["GRADING_TIMEOUT", "is_correct", "is_gradable"]

GRADING_TIMEOUT = ANSWER_TIMEOUT
"""Seconds after which an answer counts as wrong, in any thread; the first start of the worker comes on top once."""


def is_correct(completion: str, answer: str) -> bool:
    r"""Say whether the final answer of a completion is the reference.

    The content of the last `\boxed{}` counts, else what follows `####`, else what follows "the answer is", else the
    last formula or number. Decimals are exact (0.5 is 1/2, 0.33 is not 1/3); values in a list or set have no order,
    those in a tuple do; a unit may be missing but not be another one; 50% is 50 and 0.5.

    Args:
        completion: all that the model wrote.
        answer: the reference, as LaTeX, a plain number or words.

    Returns:
        False also for a completion without an answer, one that is cut off inside its box, and one whose comparison
        takes more than `GRADING_TIMEOUT`.

    Raises:
        ImportError: if the comparison takes algebra and math-verify is not installed.
        RuntimeError: if the worker process cannot run, which no answer can cause.
    """
    given = final_answer(completion)
    if given is None:
        return False
    return _is_equal(normalized(given), _reference(answer))


def is_gradable(answer: str) -> bool:
    """Whether a reference can be compared at all.

    Args:
        answer: the reference, as `is_correct` takes it.

    Returns:
        False where it is empty, too long or cut off.
    """
    return _reference(answer) != ""


@lru_cache(maxsize=4096)
def _reference(answer: str) -> str:
    boxed = final_answer(answer) if "boxed" in answer else answer
    reference = normalized(boxed or "")
    return reference if reference.count("{") == reference.count("}") else ""


def _is_equal(given: str, expected: str) -> bool:
    try:
        return equal(given, expected, ask_for_algebra)
    except AlgebraNeededError:
        pass
    try:
        return _compared(given, expected)
    except OutOfTimeError:
        return False


@lru_cache(maxsize=4096)
def _compared(given: str, expected: str) -> bool:
    """The worker's verdict, remembered: the completions of one question often agree."""
    return compare(given, expected)
