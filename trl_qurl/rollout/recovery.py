"""Retries what a vLLM server's fault interrupted, in all processes together, once it is back.

Only the main process talks to the server, so only it sees the fault; the others are in a collective
operation with it. `raise_everywhere` ends that operation in every process with the same error, and
`recover` then retries it everywhere. A retry always starts from scratch: before a generation is
retried, all weights are sent and checked again.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list

from trl_qurl.rollout.errors import ServerError, ServerLostError

logger = get_logger(__name__)  # of the main process

MAX_RECOVERIES = 3  # in a row
Result = TypeVar("Result")


def raise_everywhere(
    act: Callable[[], Result], is_served: bool = True, join: Callable[[], object] = lambda: None
) -> Result:
    """Return the result of `act`, or raise its error in the main process in every process.

    After a failure, `join` runs the collective operations of `act` in which the other processes
    still are. This is a collective operation if a server serves all processes; a colocated engine
    needs no synchronization.
    """
    failure: Exception | None = None
    try:
        try:
            result = act()
        except Exception:
            join()
            raise
    except Exception as error:
        failure = error
    outcome = [failure]
    if is_served:
        broadcast_object_list(outcome, from_process=0)
    failure = outcome[0] or failure
    if failure is not None:
        raise failure
    return result


def from_main_process(act: Callable[[], Any], is_served: bool = True) -> Any:
    """Return in every process what `act` returns in the main process; raise its error everywhere.

    `act` is called in all processes. A collective operation.
    """
    results = [raise_everywhere(act, is_served)]
    broadcast_object_list(results, from_process=0)
    return results[0]


def recover(operation: Callable[[bool], Result], reconnect: Callable[[], None]) -> Result:
    """Run an operation, retry it after server faults, and return its result.

    `operation` is called with `True` on a retry. `reconnect`, called before each, waits for the
    server. Raises the fault after `MAX_RECOVERIES` retries. A collective operation.
    """
    retries = 0
    while True:
        try:
            if retries:
                raise_everywhere(reconnect)
            return operation(retries > 0)
        except ServerError as error:
            if isinstance(error, ServerLostError) or retries == MAX_RECOVERIES:
                raise
            retries += 1
            logger.warning("Recovery %d of at most %d in a row: %s", retries, MAX_RECOVERIES, error)
