"""The ways in which weights reach an engine, behind one interface.

- `Stream`: vLLM in the trainer's process reads the stream itself; a server's workers receive it over NCCL.
- `CheckpointFiles`: the stream is written to a directory that the engine sees, and the engine reads it there. This
  works between any processes that share a file system, on any device. Where llm-compressor makes the checkpoint, the
  stream is what its result is checked by.
- `AdapterFiles`: the same way, for a LoRA adapter beside a base that the engine has.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from trl_qurl.rollout.checks.tensors import DigestRecorder
from trl_qurl.rollout.directory import CheckpointFolder, Write
from trl_qurl.rollout.engine.interface import Digests, Engine, TensorMetadata, WeightUpdate
from trl_qurl.rollout.errors import SyncError
from trl_qurl.rollout.recovery import agreed

Parameters = Callable[[], Iterator[tuple[str, torch.Tensor]]]
"""A pass over the policy's full-precision parameters under their names in the model. A collective operation."""


class Shipment(NamedTuple):
    """What a transport delivers."""

    tensors: DigestRecorder  # the rollout weights, in checkpoint format; read once
    update: WeightUpdate
    parameters: Parameters  # what the tensors are made from
    announce: Callable[[], TensorMetadata]  # what a server must know of the stream; a collective operation


class Transport(ABC):
    """One way to an engine, which is `None` in the processes that leave a server to the main one."""

    def __init__(self, engine: Engine | None, is_served: bool, sent_dtype: torch.dtype | None = None) -> None:
        self.engine = engine
        self._is_served = is_served
        self.is_source = engine is not None  # whether this process's stream is what its engine receives
        self.sent_dtype = sent_dtype  # of tensors that are not quantized; `None` leaves them as they are

    @abstractmethod
    def deliver(self, shipment: Shipment) -> list[Digests]:
        """Bring the weights to the engine, and return the digests of each of its workers.

        A collective operation: processes without an engine take part in gathering the parameters, and fail with the
        one that has it.
        """


class Stream(Transport):
    """To vLLM in this process, or to a server's workers over NCCL, who must know beforehand what will come."""

    def deliver(self, shipment: Shipment) -> list[Digests]:  # noqa: D102
        metadata = shipment.announce()
        return agreed(lambda: self._send(shipment, metadata), self._is_served)

    def _send(self, shipment: Shipment, metadata: TensorMetadata) -> list[Digests]:
        try:
            if self.engine is None:
                return []
            digests = self.engine.load_stream(shipment.tensors, metadata, shipment.update)
            if not shipment.tensors.exhausted:
                raise SyncError(
                    "The engine stopped reading before the last tensor, so its model is only partly updated. Resume "
                    "from the last checkpoint."
                )
            return digests
        finally:
            deque(shipment.tensors, maxlen=0)  # the other processes gather with this one, to the end


class CheckpointFiles(Transport):
    """To an engine that sees a directory which this run writes to."""

    def __init__(
        self,
        engine: Engine | None,
        is_served: bool,
        folder: CheckpointFolder,
        sent_dtype: torch.dtype | None = None,
    ) -> None:
        # llm-compressor writes each tensor in the policy's own dtype, so what it is checked by must not be cast.
        super().__init__(engine, is_served, None if folder.uses_llmcompressor else sent_dtype)
        self.is_source = engine is not None and folder.is_writer
        self._folder = folder
        self._count = 0

    def deliver(self, shipment: Shipment) -> list[Digests]:  # noqa: D102
        path = self._write(f"sync-{self._count + 1}", shipment)
        digests = agreed(lambda: self._load(path, shipment.update) if self.engine else [], self._is_served)
        # After a fault the next one has the same name: a server that only hung may still read what it was told to.
        self._folder.remove(f"sync-{self._count}")
        self._count += 1
        return digests

    def _write(self, name: str, shipment: Shipment) -> Path:
        if not self._folder.uses_llmcompressor:
            return self._folder.write(name, shipment.tensors)
        deque(shipment.tensors, maxlen=0)  # for digests and measurements
        return self._folder.write_with_llmcompressor(name, shipment.parameters())

    def _load(self, path: Path, update: WeightUpdate) -> list[Digests]:
        assert self.engine is not None, "only a process with an engine loads"
        return self.engine.load_checkpoint(path, update)


class AdapterFiles(CheckpointFiles):
    """To an engine that takes adapters and sees a directory which this run writes to."""

    def __init__(
        self,
        engine: Engine | None,
        is_served: bool,
        folder: CheckpointFolder,
        sent_dtype: torch.dtype | None,
        write: Write,
    ) -> None:
        super().__init__(engine, is_served, folder, sent_dtype)
        self._write_adapter = write

    def _write(self, name: str, shipment: Shipment) -> Path:
        return self._folder.write(name, shipment.tensors, self._write_adapter)

    def _load(self, path: Path, update: WeightUpdate) -> list[Digests]:
        assert self.engine is not None, "only a process with an engine loads"
        return self.engine.load_adapter(path, update)


def choose_route(
    requested: str, device: torch.device, obstacle: str | None, is_sharded: bool = False
) -> tuple[str, str]:
    """Decide how weights travel to a server: `"stream"` or `"checkpoint"`, and the reason.

    `requested` is `weight_sync` of the config, `device` the trainer's; the server may have an obstacle to streams, and
    several processes may hold the policy in parts. A stream that is asked for but not possible is a `ValueError`.
    """
    if device.type != "cuda":
        obstacle = f"NCCL needs a CUDA device, and the trainer's is {device.type!r}"
    if requested == "auto" and is_sharded and not obstacle:
        return "checkpoint", "a stream of a policy in parts has not been tried on GPUs yet (weight_sync='stream' does)"
    if requested == "auto":
        return "checkpoint" if obstacle else "stream", obstacle or "the trainer and the server both have NCCL"
    if requested == "stream" and obstacle:
        raise ValueError(
            f"weight_sync='stream' is not possible: {obstacle}. Start the server with `trl-qurl serve` where it sees "
            "a GPU, or set weight_sync='checkpoint' (or 'auto')."
        )
    return "stream" if requested == "stream" else "checkpoint", f"weight_sync={requested!r} asks for it"


def choose_adapter(
    requested: str, obstacle: str | None, rank: int, served_rank: int | None, restart: str = ""
) -> tuple[bool, str]:
    """Decide whether an adapter is sent by itself, and why.

    `requested` is `weight_sync` of the config, `obstacle` why it cannot be. A server takes adapters up to
    `served_rank` (0: none), or more if it is started again by the command `restart`; `None` for an engine of one's
    own. An adapter that is asked for but not possible is a `ValueError`, and so are whole weights for a server that
    takes adapters: its layers are not the ones that they are loaded into.
    """
    if obstacle is None and served_rank is not None and rank > served_rank:
        takes = f"adapters up to rank {served_rank}" if served_rank else "no adapters"
        obstacle = f"the server takes {takes}, and this one has rank {rank}: start it with {restart}"
    if requested == "adapter" and obstacle:
        raise ValueError(
            f"weight_sync='adapter' is not possible: {obstacle}. Or set weight_sync='auto', which merges an adapter "
            "into the weights that are sent."
        )
    if requested == "adapter":
        return True, "weight_sync='adapter' asks for it"
    if served_rank and (requested != "auto" or obstacle):
        raise ValueError(
            "The server takes adapters (--enable-lora), and this run would send it whole weights "
            f"({obstacle or f'weight_sync={requested!r}'}): start it without --enable-lora."
        )
    if served_rank:
        return True, "the server takes adapters"
    return False, obstacle or "vLLM generates faster without one"
