"""All processes of a run, in step: what fails in the main one ends in every process alike.

Only the main process talks to a server, or writes what all of them need; the others are in a
collective operation with it. A server's fault is retried in all processes together, once it is
back. A retry always starts from scratch: before a generation is retried, all weights are sent and
checked again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list

from trl_qurl.rollout.errors import ServerError, ServerLostError

logger = get_logger(__name__)  # of the main process

MAX_RECOVERIES = 3  # in a row
Result = TypeVar("Result")


def nothing() -> None:
    """Do nothing: what other processes need after most errors."""


@dataclass(frozen=True)
class Group:
    """All processes of a run. Every method is a collective operation, if they are together."""

    # Whether one engine serves all of them, or they write a file together. Processes with an engine
    # each need no word from the others.
    is_together: bool

    def run(self, act: Callable[[], Result], join: Callable[[], object] = nothing) -> Result:
        """Return the result of `act`; raise in every process what it raises in the main one.

        After a failure, `join` runs the collective operations of `act` in which the other
        processes still are.
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
        failure = self._of_main(failure) or failure
        if failure is not None:
            raise failure
        return result

    def from_main(self, act: Callable[[], Result]) -> Result:
        """Return in every process what `act` returns in the main one, which alone calls it."""
        result: Any = None
        if PartialState().is_main_process or not self.is_together:
            result = self.run(act)
        else:
            self.run(nothing)
        return self._of_main(result)

    def _of_main(self, value: Any) -> Any:
        values = [value]
        if self.is_together:
            broadcast_object_list(values, from_process=0)
        return values[0]

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


TOGETHER = Group(True)
APART = Group(False)
