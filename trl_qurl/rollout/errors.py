"""Errors between the trainer and its engine. Training never continues with an engine in doubt."""


class RolloutError(RuntimeError):
    """The engine cannot be used; the message says what happened and how to continue."""


class SyncError(RolloutError):
    """The engine does not hold the weights that were sent to it."""


class ServerError(RolloutError):
    """The vLLM server did not answer, reported a failure, or was restarted.

    `recover` retries what failed.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status  # of its HTTP answer; `None` if there was none


class ServerLostError(ServerError):
    """The vLLM server did not come back, or waiting will not help."""
