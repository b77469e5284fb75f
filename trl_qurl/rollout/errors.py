"""What can go wrong between the trainer and its engine. Training never goes on with an engine in doubt."""


class RolloutError(RuntimeError):
    """The engine cannot be used; the message says what happened and how to go on."""


class SyncError(RolloutError):
    """The engine does not hold the weights that were sent to it."""


class ServerError(RolloutError):
    """The vLLM server does not answer, answers that it failed, or was restarted. `Recovery` repeats what failed."""


class ServerLostError(ServerError):
    """The vLLM server did not come back, or waiting for it is no use."""
