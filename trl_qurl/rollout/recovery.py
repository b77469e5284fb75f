"""What a fault of a vLLM server interrupts is repeated once the server is back, in all processes together.

Only the main process talks to the server, so only it meets the fault; the others are inside a collective operation
with it. `agreed` ends that operation in every process with the same error, and `Recovery` then repeats it everywhere.
Nothing is repeated by halves: before a generation is repeated, all weights are sent and checked again.
"""

from collections.abc import Callable
from typing import TypeVar

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list

from trl_qurl.rollout.errors import RolloutError, ServerError, ServerLostError

logger = get_logger(__name__)  # of the main process

Result = TypeVar("Result")


def agreed(act: Callable[[], Result], is_served: bool = True) -> Result:
    """What `act` returns here, unless the main process's fails: then its `RolloutError`, in every process.

    A collective operation where a server serves all processes; an engine of one's own needs no agreement.
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
    """Repeats operations that a server's fault interrupted.

    After `limit` recoveries without a success between them, the fault is raised; with 0, at once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = self._in_a_row = 0

    def pop_count(self) -> int:
        """Recoveries since the last call."""
        count, self._count = self._count, 0
        return count

    def run(self, operation: Callable[[bool], Result], reconnect: Callable[[], None]) -> Result:
        """The operation's result. It is told whether it is repeated. A collective operation.

        `reconnect` waits for the server, in the main process.
        """
        is_repeated = False
        while True:
            try:
                if is_repeated:
                    agreed(reconnect)
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
