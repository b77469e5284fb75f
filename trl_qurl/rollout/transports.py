"""The ways to send weights to an engine, behind one interface.

- `Stream`: vLLM in the trainer's process reads the stream directly; a server's workers receive it over NCCL.
- `CheckpointFiles`: the stream is written to a directory, and the engine reads it from there. This works on any device
  and between any processes that share a file system. If llm-compressor writes the checkpoint, the stream only serves
  to check the result.
- `AdapterFiles`: the same for a LoRA adapter, whose base the engine already has.
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
from trl_qurl.rollout.recovery import raise_everywhere

Parameters = Callable[[], Iterator[tuple[str, torch.Tensor]]]
"""Iterates over the policy's full-precision parameters under their names in the model. A collective operation."""


class WeightUpdateStream(NamedTuple):
    """One update of the weights, for a transport to deliver."""

    tensors: DigestRecorder  # the rollout weights, in checkpoint format; read once
    update: WeightUpdate
    parameters: Parameters  # the source of the tensors
    metadata: Callable[[], TensorMetadata]  # of the tensors, for a server; a collective operation


class Transport(ABC):
    """A way to send weights to an engine. `engine` is `None` in processes that leave a server to the main one."""

    def __init__(self, engine: Engine | None, is_served: bool, sent_dtype: torch.dtype | None = None) -> None:
        self.engine = engine
        self._is_served = is_served
        self.is_source = engine is not None  # whether the engine receives this process's stream
        self.sent_dtype = sent_dtype  # of unquantized tensors; `None` does not cast them

    @abstractmethod
    def deliver(self, stream: WeightUpdateStream) -> list[Digests]:
        """Deliver the weights to the engine, and return the digests of each of its workers.

        A collective operation: processes without an engine help gather the parameters, and fail together with the one
        that has it.
        """


class Stream(Transport):
    """Sends tensors to vLLM in this process, or to a server's workers over NCCL, which need the metadata up front."""

    def deliver(self, stream: WeightUpdateStream) -> list[Digests]:  # noqa: D102
        metadata = stream.metadata()
        return raise_everywhere(lambda: self._send(stream, metadata), self._is_served)

    def _send(self, stream: WeightUpdateStream, metadata: TensorMetadata) -> list[Digests]:
        try:
            if self.engine is None:
                return []
            digests = self.engine.load_stream(stream.tensors, metadata, stream.update)
            if not stream.tensors.exhausted:
                raise SyncError(
                    "The engine stopped reading before the last tensor, so its model is only partly updated. Resume "
                    "from the last checkpoint."
                )
            return digests
        finally:
            deque(stream.tensors, maxlen=0)  # the other processes gather with this one until the end


class CheckpointFiles(Transport):
    """Writes checkpoints to a directory that the engine reads."""

    def __init__(
        self,
        engine: Engine | None,
        is_served: bool,
        folder: CheckpointFolder,
        sent_dtype: torch.dtype | None = None,
    ) -> None:
        # llm-compressor writes each tensor in the policy's own dtype, so the stream that checks it must not be cast.
        super().__init__(engine, is_served, None if folder.uses_llmcompressor else sent_dtype)
        self.is_source = engine is not None and folder.is_writer
        self._folder = folder
        self._count = 0

    def deliver(self, stream: WeightUpdateStream) -> list[Digests]:  # noqa: D102
        path = self._write(f"sync-{self._count + 1}", stream)
        digests = raise_everywhere(lambda: self._load(path, stream.update) if self.engine else [], self._is_served)
        # A retry after a fault reuses the name, because a server that only hung may still read from that path.
        self._folder.remove(f"sync-{self._count}")
        self._count += 1
        return digests

    def _write(self, name: str, stream: WeightUpdateStream) -> Path:
        if not self._folder.uses_llmcompressor:
            return self._folder.write(name, stream.tensors)
        deque(stream.tensors, maxlen=0)  # read for digests and measurements only
        return self._folder.write_with_llmcompressor(name, stream.parameters())

    def _load(self, path: Path, update: WeightUpdate) -> list[Digests]:
        assert self.engine is not None, "only a process with an engine loads"
        return self.engine.load_checkpoint(path, update)


class AdapterFiles(CheckpointFiles):
    """Writes adapters to a directory that the engine reads."""

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

    def _write(self, name: str, stream: WeightUpdateStream) -> Path:
        return self._folder.write(name, stream.tensors, self._write_adapter)

    def _load(self, path: Path, update: WeightUpdate) -> list[Digests]:
        assert self.engine is not None, "only a process with an engine loads"
        return self.engine.load_adapter(path, update)


def choose_route(
    requested: str, device: torch.device, obstacle: str | None, is_sharded: bool = False
) -> tuple[str, str]:
    """Choose how to send weights to a server, `"stream"` or `"checkpoint"`, and give the reason.

    `requested` is the config's `weight_sync`, `device` the trainer's, `obstacle` why the server accepts no stream, and
    `is_sharded` whether processes hold parts of the policy. Raises `ValueError` if a requested stream is not possible.
    """
    if device.type != "cuda":
        obstacle = f"NCCL needs a CUDA device, and the trainer's is {device.type!r}"
    if requested == "auto" and is_sharded and not obstacle:
        return "checkpoint", "streaming a sharded policy is untested on GPUs (weight_sync='stream' forces it)"
    if requested == "auto":
        return "checkpoint" if obstacle else "stream", obstacle or "the trainer and the server both have NCCL"
    if requested == "stream" and obstacle:
        raise ValueError(
            f"weight_sync='stream' is not possible: {obstacle}. Start the server with `trl-qurl serve` where it sees "
            "a GPU, or set weight_sync='checkpoint' (or 'auto')."
        )
    return "stream" if requested == "stream" else "checkpoint", f"weight_sync={requested!r} requests it"


def choose_adapter(
    requested: str, obstacle: str | None, rank: int, served_rank: int | None, restart: str = ""
) -> tuple[bool, str]:
    """Choose whether to send an adapter without its base, and give the reason.

    `requested` is the config's `weight_sync`, `obstacle` why the adapter cannot be sent alone. A server accepts
    adapters up to `served_rank` (0: none), or larger ones once restarted with the command `restart`; `None` means a
    colocated engine. Raises `ValueError` if a requested adapter is not possible, and also for whole weights to a
    server that accepts adapters, because its layers are not the ones that whole weights are loaded into.
    """
    if obstacle is None and served_rank is not None and rank > served_rank:
        limit = f"only adapters up to rank {served_rank}" if served_rank else "no adapters"
        obstacle = f"the server accepts {limit}, but this one has rank {rank}: start it with {restart}"
    if requested == "adapter" and obstacle:
        raise ValueError(
            f"weight_sync='adapter' is not possible: {obstacle}. Or set weight_sync='auto', which merges the "
            "adapter into the weights."
        )
    if requested == "adapter":
        return True, "weight_sync='adapter' requests it"
    if served_rank and (requested != "auto" or obstacle):
        raise ValueError(
            "The server accepts adapters (--enable-lora), but this run would send whole weights "
            f"({obstacle or f'weight_sync={requested!r}'}): start it without --enable-lora."
        )
    if served_rank:
        return True, "the server accepts adapters"
    return False, obstacle or "vLLM generates faster without one"
