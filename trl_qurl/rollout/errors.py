"""Errors between the trainer and its engine. Training never continues with an engine in doubt."""


class RolloutError(RuntimeError):
    """The engine cannot be used; the message says what happened and how to continue."""


class SyncError(RolloutError):
    """The engine does not hold the weights that were sent to it."""


class ServerError(RolloutError):
    """The vLLM server did not answer, reported a failure, or was restarted. `Recovery` retries what failed."""


class ServerLostError(ServerError):
    """The vLLM server did not come back, or waiting will not help."""
