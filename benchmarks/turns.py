"""Measure in turns: each contestant lives in a separate process, and one at a time is asked.

What is compared then meets the same minute of the same machine, and no engine shares a process with
another.
"""

import multiprocessing
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trl_qurl.lab.processes import die_with_parent


@dataclass(frozen=True)
class InForeground:
    """
    Answers for as long as something runs in the main thread.

    That something is then measured as users run it: OpenMP gives each thread that computes a pool
    of its own, and vLLM binds the main thread's to cores.

    Attributes:
        answer: Called in a second thread.
        run: Called in the main thread.
    """

    answer: Callable[..., Any]
    run: Callable[[], None]


class Contestant:
    """
    A measurement in a separate process.

    Args:
        build: A function of a module, run in the new process; what it returns answers `ask`, or is
            an `InForeground`.
        arguments: Its arguments.
    """

    def __init__(self, build: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, build, *arguments), daemon=True)
        self._process.start()
        there.close()

    def ask(self, *question: Any) -> Any:
        """
        The answer of the contestant, once it has measured.

        Raises:
            RuntimeError: It failed, now or while it was built, or its process ended.
        """
        try:
            self._pipe.send(question)
            succeeded, answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise RuntimeError(f"the process ended with {self._process.exitcode}") from None
        if not succeeded:
            raise RuntimeError(answer)
        return answer

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def _serve(pipe: Any, build: Callable[..., Any], *arguments: Any) -> None:
    # otherwise a killed benchmark would leave an engine behind that occupies GPU memory
    die_with_parent()
    try:
        answer = build(*arguments)
        failure = None
    except Exception as error:  # a contestant that fails is a result, and the others continue
        answer, failure = None, _sentence(error)
    if isinstance(answer, InForeground):
        answering = threading.Thread(target=_answer, args=(pipe, answer.answer, failure))
        answering.start()
        answer.run()
        answering.join()
    else:
        _answer(pipe, answer, failure)


def _answer(pipe: Any, answer: Callable[..., Any] | None, failure: str | None) -> None:
    while True:
        question = pipe.recv()
        if answer is None:
            pipe.send((False, failure))
            continue
        try:
            pipe.send((True, answer(*question)))
        except Exception as error:
            pipe.send((False, _sentence(error)))


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
