"""Measuring in turns: each contestant lives in a process of its own, and one at a time is asked.

What is compared then meets the same minute of the same machine, and no engine shares a process with another.
"""

import multiprocessing
from collections.abc import Callable
from typing import Any


class Contestant:
    """
    Something that can be measured, in a process of its own.

    Args:
        build: A function of a module; what it returns answers `ask`. Run in the new process.
        arguments: Its arguments.
    """

    def __init__(self, build: Callable[..., Callable[..., Any]], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, build, *arguments), daemon=True)
        self._process.start()
        there.close()

    def ask(self, *question: Any) -> Any:
        """
        What the contestant answers, once it has measured.

        Raises:
            RuntimeError: It failed, now or while it was built, or its process ended.
        """
        try:
            self._pipe.send(question)
            succeeded, answer = self._pipe.recv()
        except (EOFError, BrokenPipeError):
            self._process.join()
            raise RuntimeError(f"the process ended with {self._process.exitcode}") from None
        if not succeeded:
            raise RuntimeError(answer)
        return answer

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def _serve(pipe: Any, build: Callable[..., Callable[..., Any]], *arguments: Any) -> None:
    try:
        answer = build(*arguments)
        failure = None
    except Exception as error:  # a contestant that fails is a result, and the others go on
        failure = f"{type(error).__name__}: {' '.join(str(error).split())}"
    while True:
        question = pipe.recv()
        if failure is not None:
            pipe.send((False, failure))
            continue
        try:
            pipe.send((True, answer(*question)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {' '.join(str(error).split())}"))
