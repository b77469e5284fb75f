"""The ways in which weights reach an engine, behind one interface.

- `InProcess`: vLLM in the trainer's process reads the stream itself.
- `ServerStream`: the main process broadcasts the stream to a server's workers over NCCL.
- `CheckpointFiles`: the stream is written to a directory that the engine sees, and the engine reads it there. This
  works between any processes that share a file system, on any device.
- `LLMCompressorFiles`: the same, but llm-compressor makes the checkpoint; the stream is what its result is checked by.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from trl_qurl.rollout.checks.tensors import DigestRecorder
from trl_qurl.rollout.directory import CheckpointFolder
from trl_qurl.rollout.engine.interface import Engine, LoadReport, TensorMetadata, WeightUpdate
from trl_qurl.rollout.errors import SyncError

Parameters = Callable[[], Iterator[tuple[str, torch.Tensor]]]
"""A pass over the policy's full-precision parameters under their checkpoint names. A collective operation."""


class Shipment(NamedTuple):
    """What a transport delivers."""

    tensors: DigestRecorder  # the rollout weights, in checkpoint format; read once
    update: WeightUpdate
    parameters: Parameters  # what the tensors are made from
    announce: Callable[[], TensorMetadata]  # what the stream will hold; a collective operation


class Transport(ABC):
    """One way to an engine, which is `None` in a process that has none."""

    def __init__(self, engine: Engine | None) -> None:
        self.engine = engine

    @property
    def is_source(self) -> bool:
        """Whether this process's stream is what its engine receives, so that both can be compared."""
        return self.engine is not None

    @abstractmethod
    def deliver(self, shipment: Shipment) -> list[LoadReport]:
        """Bring the weights to the engine, and return what each of its workers reports.

        Every process calls this, because gathering a parameter is a collective operation; those without an engine
        only take part in that.
        """

    def _stream(self, shipment: Shipment, metadata: TensorMetadata | None) -> list[LoadReport]:
        if self.engine is None:
            deque(shipment.tensors, maxlen=0)
            return []
        reports = self.engine.load_stream(shipment.tensors, metadata, shipment.update)
        if not shipment.tensors.exhausted:
            raise SyncError(
                "The engine stopped reading before the last tensor, so its model is only partly updated. Resume from "
                "the last checkpoint."
            )
        return reports


class InProcess(Transport):
    """To vLLM in this process."""

    def deliver(self, shipment: Shipment) -> list[LoadReport]:  # noqa: D102
        return self._stream(shipment, None)


class ServerStream(Transport):
    """To a server's workers, over NCCL, who must know beforehand what will come."""

    def deliver(self, shipment: Shipment) -> list[LoadReport]:  # noqa: D102
        return self._stream(shipment, shipment.announce())


class CheckpointFiles(Transport):
    """To an engine that sees a directory which this run writes to."""

    def __init__(self, engine: Engine | None, folder: CheckpointFolder) -> None:
        super().__init__(engine)
        self._folder = folder
        self._count = 0

    @property
    def is_source(self) -> bool:
        """Whether this process writes what its engine reads."""
        return self._folder.is_writer and self.engine is not None

    def deliver(self, shipment: Shipment) -> list[LoadReport]:  # noqa: D102
        self._count += 1
        path = self._write(f"sync-{self._count}", shipment)
        reports = [] if self.engine is None else self.engine.load_checkpoint(path, shipment.update)
        self._folder.remove(f"sync-{self._count - 1}")
        return reports

    def _write(self, name: str, shipment: Shipment) -> Path:
        return self._folder.write(name, shipment.tensors)


class LLMCompressorFiles(CheckpointFiles):
    """As `CheckpointFiles`, with a checkpoint that llm-compressor makes from the policy's parameters."""

    def _write(self, name: str, shipment: Shipment) -> Path:
        deque(shipment.tensors, maxlen=0)  # for digests and measurements
        return self._folder.write_with_llmcompressor(name, shipment.parameters())


class Route(NamedTuple):
    """How weights travel to a server."""

    name: str  # "stream" or "checkpoint"
    reason: str


def choose_route(requested: str, device: torch.device, has_weight_transfer: bool) -> Route:
    """Decide how weights travel from a trainer on `device` to a server that may have vLLM's NCCL weight transfer.

    `requested` is `weight_sync` of the config; with `"auto"`, a stream where both sides have NCCL, else checkpoints.
    A stream that is asked for but not possible is a `ValueError`.
    """
    can_stream = device.type == "cuda" and has_weight_transfer
    if can_stream:
        reason = "the trainer and the server both have NCCL"
    elif device.type != "cuda":
        reason = f"NCCL needs a CUDA device, and the trainer's is {device.type!r}"
    else:
        reason = "the server was started without --weight-transfer-config"
    if requested == "auto":
        return Route("stream" if can_stream else "checkpoint", reason)
    if requested == "stream" and not can_stream:
        raise ValueError(
            f"weight_sync='stream' is not possible: {reason}. Start the server with `trl-qurl serve` where it sees a "
            "GPU, or set weight_sync='checkpoint' (or 'auto')."
        )
    return Route("stream" if requested == "stream" else "checkpoint", f"weight_sync={requested!r} asks for it")
