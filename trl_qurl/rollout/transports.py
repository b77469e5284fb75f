"""The ways in which weights reach an engine, behind one interface.

- `Stream`: vLLM in the trainer's process reads the stream itself; a server's workers receive it over NCCL.
- `CheckpointFiles`: the stream is written to a directory that the engine sees, and the engine reads it there. This
  works between any processes that share a file system, on any device. Where llm-compressor makes the checkpoint, the
  stream is what its result is checked by.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from trl_qurl.rollout.checks.tensors import DigestRecorder
from trl_qurl.rollout.directory import CheckpointFolder
from trl_qurl.rollout.engine.interface import Digests, Engine, TensorMetadata, WeightUpdate
from trl_qurl.rollout.errors import SyncError

Parameters = Callable[[], Iterator[tuple[str, torch.Tensor]]]
"""A pass over the policy's full-precision parameters under their checkpoint names. A collective operation."""


class Shipment(NamedTuple):
    """What a transport delivers."""

    tensors: DigestRecorder  # the rollout weights, in checkpoint format; read once
    update: WeightUpdate
    parameters: Parameters  # what the tensors are made from
    announce: Callable[[], TensorMetadata]  # what a server must know of the stream; a collective operation


class Transport(ABC):
    """One way to an engine, which is `None` in a process that has none."""

    def __init__(self, engine: Engine | None, sent_dtype: torch.dtype | None = None) -> None:
        self.engine = engine
        self.is_source = engine is not None  # whether this process's stream is what its engine receives
        self.sent_dtype = sent_dtype  # of tensors that are not quantized; `None` leaves them as they are

    @abstractmethod
    def deliver(self, shipment: Shipment) -> list[Digests]:
        """Bring the weights to the engine, and return the digests of each of its workers.

        A collective operation: processes without an engine take part in gathering the parameters.
        """


class Stream(Transport):
    """To vLLM in this process, or to a server's workers over NCCL, who must know beforehand what will come."""

    def deliver(self, shipment: Shipment) -> list[Digests]:  # noqa: D102
        metadata = shipment.announce()
        if self.engine is None:
            deque(shipment.tensors, maxlen=0)
            return []
        digests = self.engine.load_stream(shipment.tensors, metadata, shipment.update)
        if not shipment.tensors.exhausted:
            raise SyncError(
                "The engine stopped reading before the last tensor, so its model is only partly updated. Resume from "
                "the last checkpoint."
            )
        return digests


class CheckpointFiles(Transport):
    """To an engine that sees a directory which this run writes to."""

    def __init__(self, engine: Engine | None, folder: CheckpointFolder, sent_dtype: torch.dtype | None = None) -> None:
        # llm-compressor writes each tensor in the policy's own dtype, so what it is checked by must not be cast.
        super().__init__(engine, None if folder.uses_llmcompressor else sent_dtype)
        self.is_source = engine is not None and folder.is_writer
        self._folder = folder
        self._count = 0

    def deliver(self, shipment: Shipment) -> list[Digests]:  # noqa: D102
        self._count += 1
        name = f"sync-{self._count}"
        if self._folder.uses_llmcompressor:
            deque(shipment.tensors, maxlen=0)  # for digests and measurements
            path = self._folder.write_with_llmcompressor(name, shipment.parameters())
        else:
            path = self._folder.write(name, shipment.tensors)
        digests = [] if self.engine is None else self.engine.load_checkpoint(path, shipment.update)
        self._folder.remove(f"sync-{self._count - 1}")
        return digests


def choose_route(requested: str, device: torch.device, has_weight_transfer: bool) -> tuple[str, str]:
    """Decide how weights travel to a server: `"stream"` or `"checkpoint"`, and the reason.

    `requested` is `weight_sync` of the config, `device` the trainer's; the server may have NCCL weight transfer. A
    stream that is asked for but not possible is a `ValueError`.
    """
    obstacle = None
    if device.type != "cuda":
        obstacle = f"NCCL needs a CUDA device, and the trainer's is {device.type!r}"
    elif not has_weight_transfer:
        obstacle = "the server was started without --weight-transfer-config"
    if requested == "auto":
        return "checkpoint" if obstacle else "stream", obstacle or "the trainer and the server both have NCCL"
    if requested == "stream" and obstacle:
        raise ValueError(
            f"weight_sync='stream' is not possible: {obstacle}. Start the server with `trl-qurl serve` where it sees "
            "a GPU, or set weight_sync='checkpoint' (or 'auto')."
        )
    return "stream" if requested == "stream" else "checkpoint", f"weight_sync={requested!r} asks for it"
