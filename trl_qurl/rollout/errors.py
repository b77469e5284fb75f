"""What can go wrong between the trainer and its engine. Training never goes on after one of these."""


class RolloutError(RuntimeError):
    """The engine cannot be used; the message says what happened and how to go on."""


class SyncError(RolloutError):
    """The engine does not hold the weights that were sent to it."""


class ServerError(RolloutError):
    """The vLLM server does not answer, or answers that it failed."""
