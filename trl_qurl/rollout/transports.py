"""The ways to send weights to an engine, behind one interface.

- `Stream`: vLLM in the trainer's process reads the stream directly; a server's workers receive it over NCCL.
- `CheckpointFiles`: the stream is written to a directory, and the engine reads it from there. This works on any device
  and between any processes that share a file system. If llm-compressor writes the checkpoint, the stream only serves
  to check the result. A LoRA adapter, whose base the engine already has, is sent the same way.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from trl_qurl.quantization.checkpoint_form import NamedTensors
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.rollout.checks.tensors import MeteredStream
from trl_qurl.rollout.directory import CheckpointFolder, Write
from trl_qurl.rollout.engine.interface import Engine, TensorMetadata, WeightUpdate
from trl_qurl.rollout.errors import SyncError
from trl_qurl.rollout.recovery import raise_everywhere

Parameters = Callable[[], Iterator[tuple[str, torch.Tensor]]]
"""Iterates over the policy's full-precision parameters under their names in the model. A collective operation."""


class Transport(ABC):
    """A way to send weights to an engine. `engine` is `None` in processes that leave a server to the main one."""

    def __init__(self, engine: Engine | None, is_served: bool, sent_dtype: torch.dtype | None = None) -> None:
        self.engine = engine
        self._is_served = is_served
        self.is_source = engine is not None  # whether the engine receives this process's stream
        self.sent_dtype = sent_dtype  # of unquantized tensors; `None` does not cast them

    @abstractmethod
    def deliver(self, update: WeightUpdate, stream: MeteredStream, parameters: Parameters) -> None:
        """Deliver one update of the weights to the engine.

        A collective operation: processes without an engine help gather the parameters, and fail together with the one
        that has it.

        Args:
            update: Name of the weights, and whether workers record digests.
            stream: The rollout weights, in checkpoint format; read once.
            parameters: The full-precision parameters, for another pass over them.
        """


class Stream(Transport):
    """Sends tensors to vLLM in this process, or to a server's workers over NCCL.

    A server needs the tensors' metadata up front, which `weights` describes.
    """

    def __init__(
        self,
        engine: Engine | None,
        is_served: bool,
        sent_dtype: torch.dtype | None = None,
        weights: WeightStream | None = None,
    ) -> None:
        super().__init__(engine, is_served, sent_dtype)
        self._weights = weights
        self._metadata: TensorMetadata = []

    def deliver(self, update: WeightUpdate, stream: MeteredStream, parameters: Parameters) -> None:  # noqa: D102
        if self._weights is not None and not self._metadata:
            self._metadata = stream_metadata(parameters(), self._weights, self.sent_dtype)
        raise_everywhere(lambda: self._send(update, stream), self._is_served)

    def _send(self, update: WeightUpdate, stream: MeteredStream) -> None:
        try:
            if self.engine is None:
                return
            self.engine.load_stream(stream, self._metadata, update)
            if not stream.exhausted:
                raise SyncError(
                    "The engine stopped reading before the last tensor, so its model is only partly updated. Resume "
                    "from the last checkpoint."
                )
        finally:
            deque(stream, maxlen=0)  # the other processes gather with this one until the end


class CheckpointFiles(Transport):
    """Writes checkpoints to a directory that the engine reads, or adapters, if `write_adapter` is given."""

    def __init__(
        self,
        engine: Engine | None,
        is_served: bool,
        folder: CheckpointFolder,
        sent_dtype: torch.dtype | None = None,
        write_adapter: Write | None = None,
    ) -> None:
        # llm-compressor writes each tensor in the policy's own dtype, so the stream that checks it must not be cast.
        super().__init__(engine, is_served, None if folder.uses_llmcompressor else sent_dtype)
        self.is_source = engine is not None and folder.is_writer
        self._folder = folder
        self._write_adapter = write_adapter
        self._count = 0

    def deliver(self, update: WeightUpdate, stream: MeteredStream, parameters: Parameters) -> None:  # noqa: D102
        name = f"sync-{self._count + 1}"
        if self._folder.uses_llmcompressor:
            deque(stream, maxlen=0)  # read for digests and measurements only
            path = self._folder.write_with_llmcompressor(name, parameters())
        else:
            path = self._folder.write(name, stream, self._write_adapter)
        raise_everywhere(lambda: self._load(path, update), self._is_served)
        # A retry after a fault reuses the name, because a server that only hung may still read from that path.
        self._folder.remove(f"sync-{self._count}")
        self._count += 1

    def _load(self, path: Path, update: WeightUpdate) -> None:
        if self.engine is not None:
            load = self.engine.load_adapter if self._write_adapter else self.engine.load_checkpoint
            load(path, update)


def stream_metadata(
    named_parameters: NamedTensors, weights: WeightStream, dtype: torch.dtype | None
) -> TensorMetadata:
    """Return the metadata of the tensors that the stream will yield, in order, without rounding any."""
    return [
        (stored.name, str(stored.dtype).removeprefix("torch."), list(stored.shape))
        for name, _ in named_parameters
        for stored in weights.stored(name, dtype)
    ]


def choose_route(
    requested: str, device: torch.device, obstacle: str | None, is_sharded: bool = False
) -> tuple[str, str]:
    """Choose how to send weights to a server, `"stream"` or `"checkpoint"`, and give the reason.

    `requested` is the config's `weight_sync`, `device` the trainer's, `obstacle` why the server accepts no stream, and
    `is_sharded` whether processes hold parts of the policy. Raises `ValueError` if a requested stream is not possible.
    """
    if device.type != "cuda":
        obstacle = f"NCCL needs a CUDA device, and the trainer's is {device.type!r}"
    if requested == "stream" and obstacle:
        raise ValueError(
            f"weight_sync='stream' is not possible: {obstacle}. Start the server with `trl-qurl serve` where it sees "
            "a GPU, or set weight_sync='checkpoint' (or 'auto')."
        )
    if requested != "auto":
        return "stream" if requested == "stream" else "checkpoint", f"weight_sync={requested!r} requests it"
    if is_sharded and not obstacle:
        obstacle = "streaming a sharded policy is untested on GPUs (weight_sync='stream' forces it)"
    return ("checkpoint", obstacle) if obstacle else ("stream", "the trainer and the server both have NCCL")


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
