"""How weights reach a server: as a stream over NCCL, or as a checkpoint in a directory that both sides see."""

from typing import NamedTuple

import torch


class Transport(NamedTuple):
    """How weights reach a server, and why that way."""

    name: str  # "stream" or "checkpoint"
    reason: str


def choose_transport(requested: str, device: torch.device, has_weight_transfer: bool) -> Transport:
    """
    Decide `weight_sync="auto"` for a server.

    Args:
        requested: `"auto"`, `"stream"` or `"checkpoint"`.
        device: The trainer's.
        has_weight_transfer: Whether the server was started with vLLM's NCCL weight transfer.

    Raises:
        ValueError: A stream is asked for that this trainer or this server cannot have.
    """
    reason = "the trainer and the server both have NCCL"
    if device.type != "cuda":
        reason = f"NCCL needs a CUDA device and the trainer's is {device.type!r}"
    elif not has_weight_transfer:
        reason = "the server was started without --weight-transfer-config"
    can_stream = device.type == "cuda" and has_weight_transfer
    if requested == "stream" and not can_stream:
        raise ValueError(
            f"weight_sync='stream' is not possible: {reason}. Start the server with `trl-qurl serve` where it sees a "
            "GPU, or set weight_sync='checkpoint' (or 'auto')."
        )
    if requested != "auto":
        return Transport(requested, "weight_sync says so")
    return Transport("stream" if can_stream else "checkpoint", reason)
