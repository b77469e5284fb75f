"""A verifiable reward: is the final answer of a completion equal to the reference?"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from trl_qurl.lab.grading import is_correct, is_gradable

Completion = str | list[dict[str, str]]


def answer_reward(completions: list[Completion], answer: list[str], **kwargs: Any) -> list[float | None]:
    r"""Score each completion 1.0 if its final answer equals the reference, 0.0 if not.

    The content of the last `\boxed{}` counts; without one, the last formula or number (`trl_qurl.lab.grading`). In any
    thread, a completion takes `trl_qurl.lab.grading.GRADING_TIMEOUT` seconds at most.

    Args:
        completions: texts, or conversations whose last message holds the text.
        answer: reference answers, one per completion, as LaTeX or plain numbers.
        **kwargs: further columns of the data set, which TRL passes and this reward does not use.

    Returns:
        One reward per completion; `None`, which TRL leaves out of the mean, where the reference cannot be parsed.

    Raises:
        ImportError: if math-verify is not installed.
    """
    # Asked before the first answer that needs it: a run must not end at its hundredth step.
    if find_spec("math_verify") is None:
        raise ImportError("answer_reward needs math-verify: run `pip install trl-qurl[math]`.")
    return [
        float(is_correct(_text(completion), str(reference))) if is_gradable(str(reference)) else None
        for completion, reference in zip(completions, answer, strict=True)
    ]


def _text(completion: Completion) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]
