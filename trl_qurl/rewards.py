r"""Verifiable rewards: does the final answer of a completion equal the reference?

This module extracts the answer (the last `\boxed{}`, else what follows `####`, else what math-verify finds at the end
of the text); math-verify parses and compares it. Comparisons run in a worker process that starts with the first one.
SymPy can spend hours on an answer of ten characters, and only a process can be killed at any time and from any thread.
The worker is a fresh interpreter, not a fork: it shares neither CUDA nor locks with the training process, does not
import torch, and does not rerun the user's script.

Out of scope: the steps and style of a solution, unit conversion, rounding, and the question itself.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from importlib.util import find_spec
from typing import Any

Completion = str | list[dict[str, str]]

GRADING_TIMEOUT = 15.0
"""Wall-clock seconds that a comparison may take; the first one also waits for the worker to start."""

CPU_SECONDS = 2.0
"""CPU seconds that a comparison may take, regardless of the load on the machine."""

EXTRA_MEMORY = 1 << 30
"""Bytes that the worker may use on top of its libraries."""

LONGEST_ANSWER, SEARCHED_END = 1000, 2000
"""Characters of the longest answer, and of the end of a completion that is searched for an answer without a box."""

STARTUP_TIMEOUT = 120
COMPARISONS_PER_WORKER = 5000  # then restart it, because the libraries cache what they parse
READY, EQUAL, DIFFERENT, UNREADABLE = b"ready", b"equal", b"different", b"unreadable"

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\[{}\\]|[{}]")
_BETWEEN_BOXES = re.compile(r"[\s$\\()\[\]]*(?:,|,?\s*(?:and|or))[\s$\\()\[\]]*(?:[a-zA-Z]\s*=\s*)?")
_MARKED = re.compile(r"####[ \t]*([^\n]+)\s*\Z")


def answer_reward(completions: list[Completion], answer: list[str], **kwargs: Any) -> list[float | None]:
    r"""Score each completion 1.0 if its final answer equals the reference, else 0.0.

    Args:
        completions: Texts, or conversations with the text in the last message.
        answer: Reference answers, one per completion, as LaTeX or plain numbers.
        **kwargs: Other columns of the data set, which TRL passes; ignored.

    Returns:
        One reward per completion; `None` if the reference cannot be parsed. TRL leaves `None` out of the mean.

    Raises:
        ImportError: If math-verify is not installed.
    """
    _require_math_verify()  # fail fast, not at step 100
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    verdicts = [_verdict(text, str(reference)) for text, reference in zip(texts, answer, strict=True)]
    return [None if verdict == UNREADABLE else float(verdict == EQUAL) for verdict in verdicts]


def is_correct(completion: str, answer: str) -> bool:
    r"""Return whether the final answer of a completion equals the reference.

    The last `\boxed{}` counts, even if an earlier one was right. Text before `</think>` is ignored.

    Args:
        completion: Everything that the model wrote.
        answer: The reference, as LaTeX, a plain number or words.

    Returns:
        Whether they are equal. `False` also if the completion has no answer or ends inside its box or its thoughts,
        if the reference cannot be parsed, or if the comparison exceeds `CPU_SECONDS`, `GRADING_TIMEOUT` or
        `EXTRA_MEMORY`.

    Raises:
        ImportError: If math-verify is not installed.
        RuntimeError: If the worker process cannot start. No answer can cause this.
    """
    return _verdict(completion, answer) == EQUAL


def _final_answer(completion: str) -> str:
    """Return what math-verify should read: a box, or the end of the text; empty if the completion is cut off."""
    _, _, spoken = completion.rpartition("</think>")
    if "<think>" in spoken:
        return ""
    answer, start = "", 0
    for box in reversed(list(_BOX.finditer(spoken))[-8:]):
        end = _closing_brace(spoken, box.end())
        if end is None:
            return ""
        if answer and not _BETWEEN_BOXES.fullmatch(spoken, end + 1, start):
            break
        content, start = spoken[box.end() : end].strip().rstrip("."), box.start()
        if content and content != answer:
            answer = f"{content}, {answer}" if answer else content  # x = [1] or x = [2]
    if not answer and (marked := _MARKED.search(spoken[-SEARCHED_END:])):
        answer = marked[1]
    if answer:
        return f"\\boxed{{{answer}}}" if len(answer) <= LONGEST_ANSWER else ""
    return spoken[-SEARCHED_END:]


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return brace.start()
    return None


def _require_math_verify() -> None:
    if find_spec("math_verify") is None:
        raise ImportError("Grading answers needs math-verify: run `pip install 'trl-qurl[math]'`.")


def _verdict(completion: str, reference: str) -> bytes:
    reference = reference.strip(" $\n").rstrip(".")
    if not reference or len(reference) > LONGEST_ANSWER:
        return UNREADABLE
    question = json.dumps([_final_answer(completion), reference]).encode() + b"\n"
    with _lock:
        for _ in range(2):
            if verdict := _ask(question):
                return verdict
            if _end_worker() in (-signal.SIGPROF, -signal.SIGALRM):
                break
            # The worker retired or was killed from outside, not because of the answer: ask once more.
        return DIFFERENT


def _ask(question: bytes) -> bytes:
    """Return the worker's verdict; empty if it died without one."""
    global _worker
    try:
        if _worker is None:
            _worker = _start_worker()
        assert _worker.stdin is not None and _worker.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            _worker.stdin.write(question)
        return _worker.stdout.readline().strip()
    except BaseException:
        _end_worker()  # after an interrupt, a late verdict must not be read as the next answer
        raise


def _start_worker() -> subprocess.Popen[bytes]:
    _require_math_verify()
    # With -P and this process's path, the worker imports what we would, but nothing from the current directory.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    worker = subprocess.Popen(
        [sys.executable, "-P", "-c", f"from {__name__} import _serve; _serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,  # no buffers means no locks that a fork could copy while they are held
        env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"},  # SymPy depends on the order of sets
        start_new_session=True,  # Ctrl-C must not reach the worker
    )
    assert worker.stdout is not None
    if worker.stdout.readline().strip() != READY:
        with worker:
            worker.kill()
        raise RuntimeError(
            f"The worker that grades answers exited with status {worker.returncode} before its first question; see "
            "its standard error. Check the limits on memory and processes (`ulimit -a`)."
        )
    return worker


def _end_worker() -> int | None:
    """Kill the worker, if there is one, and return its exit status; the next question starts a new one."""
    global _worker
    worker, _worker = _worker, None
    if worker is None:
        return None
    with worker:
        worker.kill()
    return worker.returncode


def _after_fork() -> None:
    """Reset a forked child to start its own worker; no thread will ever release its copy of the parent's lock."""
    global _lock, _worker
    for pipe in (_worker.stdin, _worker.stdout) if _worker else ():
        assert pipe is not None
        pipe.close()
    _lock, _worker = threading.Lock(), None


_lock = threading.Lock()
_worker: subprocess.Popen[bytes] | None = None
os.register_at_fork(after_in_child=_after_fork)
atexit.register(_end_worker)


# In the worker


def _serve() -> None:
    """Answer questions, one per line, until the input ends. The kernel kills the process when a timer expires."""
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.alarm(STARTUP_TIMEOUT)
    replies, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)  # output of the libraries must not be read as a verdict
    logging.disable(logging.CRITICAL)
    _compare("\\boxed{\\frac{\\sqrt{3}}{2}+x^2}", "x^2+\\sqrt{3}/2")  # imports the libraries
    os.dup2(null, 2)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    os.write(replies, READY + b"\n")
    for _ in range(COMPARISONS_PER_WORKER):
        line = sys.stdin.readline()
        if not line:
            return
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        signal.setitimer(signal.ITIMER_REAL, GRADING_TIMEOUT)
        verdict = _compare(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(replies, verdict + b"\n")


def _compare(answer: str, reference: str) -> bytes:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    from sympy.core.random import seed

    seed(0)
    latex = LatexExtractionConfig(boxed_match_priority=0)
    # math-verify's own timers are off: they cannot interrupt a single long multiplication. `_serve` sets the kernel's.
    expected = parse(f"\\boxed{{{reference}}}", [latex], parsing_timeout=None)
    actual = parse(answer, [latex, ExprExtractionConfig()], parsing_timeout=None)
    if not expected:
        return UNREADABLE
    return EQUAL if verify(expected, actual, timeout_seconds=None) else DIFFERENT
