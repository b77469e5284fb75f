"""Retry operations that a vLLM server fault interrupted, in all processes together, once the server is back.

Only the main process talks to the server, so only it sees the fault; the others are in a collective operation with it.
`raise_everywhere` ends that operation in every process with the same error, and `Recovery` then retries it everywhere.
A retry always starts from scratch: before a generation is retried, all weights are sent and checked again.
"""

from collections.abc import Callable
from typing import TypeVar

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list

from trl_qurl.rollout.errors import RolloutError, ServerError, ServerLostError

logger = get_logger(__name__)  # of the main process

Result = TypeVar("Result")


def raise_everywhere(act: Callable[[], Result], is_served: bool = True) -> Result:
    """Return the result of `act`. If it fails in the main process, raise its `RolloutError` in every process.

    A collective operation if a server serves all processes; a colocated engine needs no synchronization.
    """
    if not is_served:
        return act()
    failure: RolloutError | None = None
    try:
        result = act()
    except RolloutError as error:
        failure = error
    outcome = [failure]
    broadcast_object_list(outcome, from_process=0)
    if failure := outcome[0] or failure:
        raise failure
    return result


class Recovery:
    """Retries operations that a server fault interrupted.

    After `limit` recoveries without a success in between, the fault is raised; a limit of 0 raises it immediately.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = self._in_a_row = 0

    def pop_count(self) -> int:
        """Return the number of recoveries since the last call."""
        count, self._count = self._count, 0
        return count

    def run(self, operation: Callable[[bool], Result], reconnect: Callable[[], None]) -> Result:
        """Run an operation, retry it after faults, and return its result. A collective operation.

        `operation` is called with `True` on a retry. `reconnect` waits for the server, in the main process.
        """
        is_repeated = False
        while True:
            try:
                if is_repeated:
                    raise_everywhere(reconnect)
                result = operation(is_repeated)
            except ServerLostError:
                raise
            except ServerError as error:
                if self._in_a_row >= self._limit:
                    raise
                self._in_a_row += 1
                self._count += 1
                logger.warning("Recovery %d of at most %d in a row: %s", self._in_a_row, self._limit, error)
                is_repeated = True
            else:
                self._in_a_row = 0
                return result
