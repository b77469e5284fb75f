"""A verifiable reward: is the final answer of a completion mathematically equal to the reference?"""

from __future__ import annotations

import threading
from typing import Any

Completion = str | list[dict[str, str]]

# Seconds. math-verify counts them with a Unix signal, which Python allows in the main thread only.
PARSING_TIMEOUT = 5
VERIFYING_TIMEOUT = 5


def answer_reward(completions: list[Completion], answer: list[str], **kwargs: Any) -> list[float | None]:
    r"""Score each completion 1.0 if its final answer equals the reference, 0.0 if not.

    The content of the last `\boxed{}` counts; without one, the last formula or number. In a thread other than the main
    one nothing bounds the time that a single comparison takes.

    Args:
        completions: texts, or conversations whose last message holds the text.
        answer: reference answers, one per completion, as LaTeX or plain numbers.
        **kwargs: further columns of the data set, which TRL passes and this reward does not use.

    Returns:
        One reward per completion; `None`, which TRL leaves out of the mean, where the reference cannot be parsed.

    Raises:
        ImportError: if math-verify is not installed.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ImportError("answer_reward needs math-verify: run `pip install trl-qurl[math]`.") from error

    in_main_thread = threading.current_thread() is threading.main_thread()
    parsing_timeout = PARSING_TIMEOUT if in_main_thread else None
    verifying_timeout = VERIFYING_TIMEOUT if in_main_thread else None

    rewards: list[float | None] = []
    for completion, reference in zip(completions, answer, strict=True):
        expected = parse(f"\\boxed{{{reference}}}", parsing_timeout=parsing_timeout)
        if not expected:
            rewards.append(None)
            continue
        given = parse(_text(completion), parsing_timeout=parsing_timeout)
        rewards.append(float(verify(expected, given, timeout_seconds=verifying_timeout)))
    return rewards


def _text(completion: Completion) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]
