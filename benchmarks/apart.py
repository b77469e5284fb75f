"""Measure in a separate process, with its own engine and peak
memory, and keep going if it fails.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

from trl_qurl.lab.processes import die_with_parent

Measure = Callable[..., Iterator[dict[str, Any]]]
"""Yields what it knows so far: a later part may need more memory than the machine has."""


def measure_apart(measure: Measure, *arguments: Any) -> dict[str, Any]:
    """
    All that a measurement yielded, merged; under `failure`, what went wrong after that.

    Args:
        measure: A function of a module, run in a new process.
        arguments: Its arguments.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(there, measure, *arguments))
    child.start()
    there.close()
    result: dict[str, Any] = {}
    try:
        while True:
            result |= here.recv()
    except EOFError:
        child.join()
    if child.exitcode != 0:
        result.setdefault("failure", f"the process ended with {child.exitcode}")
    return result


def _send(there: Any, measure: Measure, *arguments: Any) -> None:
    # otherwise a killed benchmark would leave an engine behind that occupies GPU memory
    die_with_parent()
    try:
        for result in measure(*arguments):
            there.send(result)
    except Exception as error:  # a case that fails is a result, and the others continue
        there.send({"failure": f"{type(error).__name__}: {error}"})
        raise
