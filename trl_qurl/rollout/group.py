"""All processes of a run, in step: what fails in the main one ends in every process alike.

Only the main process talks to a server, or writes what all of them need; the others are in a
collective operation with it. A server's fault is retried in all processes together, once it is
back. A retry always starts from scratch: before a generation is retried, all weights are sent and
checked again.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list

from trl_qurl.rollout.errors import ServerError, ServerLostError

logger = get_logger(__name__)  # of the main process

MAX_RECOVERIES = 3  # in a row
Result = TypeVar("Result")


def nothing() -> None:
    """Do nothing: what other processes do after most errors."""


class Together:
    """The processes that one server serves, or that write a file together.

    Every method is a collective operation.
    """

    is_shared = True  # whether one engine serves all processes

    def run(self, act: Callable[[], Result], join: Callable[[], object] = nothing) -> Result:
        """Return the result of `act`; raise in every process what it raises in the main one.

        After a failure, `join` runs the collective operations of `act` in which the other
        processes still are.
        """
        failure: Exception | None = None
        try:
            result = act_or_join(act, join)
        except Exception as error:
            failure = error
        outcome = [failure]
        broadcast_object_list(outcome, from_process=0)
        failure = outcome[0] or failure
        if failure is not None:
            raise failure
        return result

    def from_main(self, act: Callable[[], Result]) -> Result:
        """Return in every process what `act` returns, or raise its error.

        Only the main process calls it.
        """
        result: Any = None
        failure: Exception | None = None
        if PartialState().is_main_process:
            try:
                result = act()
            except Exception as error:
                failure = error
        outcome = [(result, failure)]
        broadcast_object_list(outcome, from_process=0)
        result, failure = outcome[0]
        if failure is not None:
            raise failure
        return result

    def recover(self, operation: Callable[[bool], Result], reconnect: Callable[[], None]) -> Result:
        """Run an operation, retry it after server faults, and return its result.

        `operation` is called with `True` on a retry. `reconnect`, called before each, waits for the
        server. Raises the fault after `MAX_RECOVERIES` retries.
        """
        retries = 0
        while True:
            try:
                if retries:
                    self.run(reconnect)
                return operation(retries > 0)
            except ServerError as error:
                if isinstance(error, ServerLostError) or retries == MAX_RECOVERIES:
                    raise
                retries += 1
                logger.warning(
                    "Recovery %d of at most %d in a row: %s", retries, MAX_RECOVERIES, error
                )


class Apart(Together):
    """Processes with an engine each, which need no word from the others."""

    is_shared = False

    def run(self, act: Callable[[], Result], join: Callable[[], object] = nothing) -> Result:
        """Return the result of `act`, or raise its error, in this process alone."""
        return act_or_join(act, join)

    def from_main(self, act: Callable[[], Result]) -> Result:
        """Return the result of `act`, or raise its error, in this process alone."""
        return act()


def act_or_join(act: Callable[[], Result], join: Callable[[], object]) -> Result:
    """Return the result of `act`; call `join` before its error is raised."""
    try:
        return act()
    except Exception:
        join()
        raise


TOGETHER = Together()
APART = Apart()
