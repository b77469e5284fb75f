"""The routes of weights to an engine: a stream, files of a checkpoint (ours or llm-compressor's), an adapter alone.

`QuantizedVLLMGeneration` chooses one when it starts an engine. From then on, every sync asks the same of each:
`tensors` to send, `send` to load them, and `check` for what the engine has and is not sent.
"""

import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trl_qurl.quantization.merging import model_parameters
from trl_qurl.quantization.stream import WeightStream, on_grid
from trl_qurl.rollout.adapter import FrozenBase, adapter_tensors, write_adapter
from trl_qurl.rollout.checks.tensors import MeteredStream
from trl_qurl.rollout.directory import CheckpointFolder
from trl_qurl.rollout.recovery import raise_everywhere
from trl_qurl.rollout.wire import Engine, TensorMetadata, WeightUpdate


@dataclass(eq=False)
class Route(ABC):
    """A route of whole weights from one policy to one engine. All methods are collective operations."""

    model: Any
    weights: WeightStream  # of this model
    is_served: bool  # whether the engine is a server, which only the main process talks to
    engine: Engine | None = field(init=False, default=None)  # `None` where only the main process talks to a server
    dtype: torch.dtype | None = field(init=False, default=None)  # of unquantized tensors; `None` does not cast them

    is_merged = True  # whether the engine gets an adapter merged into the weights

    @property
    def always_probes(self) -> bool:
        """Whether to probe the engine after every sync, whatever the interval."""
        return False

    @property
    def is_source(self) -> bool:
        """Whether this process can compare what it sends with what its engine receives."""
        return self.engine is not None

    def write_start(self, folder: CheckpointFolder) -> Path:
        """Write the checkpoint that a colocated engine starts from."""
        return folder.write("start", self.weights.tensors(policy_parameters(self.model, self.weights.grid)))

    def attach(self, engine: Engine | None, dtype: str | None) -> None:
        """Use an engine that has started. Casting to its dtype saves memory, and bytes to send and to digest."""
        self.engine, self.dtype = engine, getattr(torch, dtype) if dtype else None

    def check(self) -> None:  # noqa: B027
        """Raise `SyncError` if a server lacks what is not sent."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors to send, from one pass over the parameters."""
        return self.weights.tensors(policy_parameters(self.model, self.weights.grid), self.dtype)

    @abstractmethod
    def send(self, update: WeightUpdate, stream: MeteredStream) -> None:
        """Load the metered `tensors` into the engine. Raises in all processes what `Engine.load_stream` raises."""


class StreamRoute(Route):
    """A colocated engine reads the stream in this process, and a server's workers receive it over NCCL."""

    @property
    def always_probes(self) -> bool:
        """Digests would hide a race between a receiver's streams, and no GPU has shown yet that there is none."""
        return self.is_served

    @functools.cached_property
    def _metadata(self) -> TensorMetadata | None:
        return stream_metadata(self.weights, self.dtype) if self.is_served else None

    def send(self, update: WeightUpdate, stream: MeteredStream) -> None:  # noqa: D102
        drain = functools.partial(deque[Any], stream, maxlen=0)  # processes without an engine gather with the others

        def load() -> None:
            if self.engine is not None:
                self.engine.load_stream(stream, update._replace(metadata=self._metadata))
            drain()

        raise_everywhere(load, self.is_served, drain)


@dataclass(eq=False)
class CheckpointRoute(Route):
    """Files of a checkpoint, for any device and any processes that share a file system."""

    folder: CheckpointFolder
    _sent = 0  # checkpoints that the engine has loaded

    @property
    def is_source(self) -> bool:  # noqa: D102
        return self.engine is not None and self.folder.is_writer

    def send(self, update: WeightUpdate, stream: MeteredStream) -> None:  # noqa: D102
        # A retry after a fault reuses the name, because a server that only hung may still read from that path.
        path = self._write(f"sync-{self._sent + 1}", stream)
        raise_everywhere(lambda: self._load(self.engine, path, update) if self.engine else None, self.is_served)
        self.folder.remove(f"sync-{self._sent}")
        self._sent += 1

    def _write(self, name: str, stream: MeteredStream) -> Path:
        return self.folder.write(name, stream)

    def _load(self, engine: Engine, path: Path, update: WeightUpdate) -> None:
        engine.load_checkpoint(path, update)


class LLMCompressorRoute(CheckpointRoute):
    """A checkpoint that llm-compressor writes. Our stream is only compared with what the engine loads."""

    def attach(self, engine: Engine | None, dtype: str | None) -> None:  # noqa: D102
        super().attach(engine, None)  # llm-compressor writes tensors in the policy's own dtype

    def _write(self, name: str, stream: MeteredStream) -> Path:
        deque(stream, maxlen=0)
        parameters = policy_parameters(self.model, self.weights.grid)
        return self.folder.write(name, parameters, self.folder.writer.write_with_llmcompressor)


@dataclass(eq=False)
class AdapterRoute(CheckpointRoute):
    """Files of a LoRA adapter, for an engine that has the base below it."""

    base: FrozenBase
    is_merged = False

    def write_start(self, folder: CheckpointFolder) -> Path:  # noqa: D102
        return self.base.write(folder)

    def attach(self, engine: Engine | None, dtype: str | None) -> None:  # noqa: D102
        super().attach(engine, dtype)
        if self.is_served:  # otherwise, the engine has started from this base
            if self.base.rounds:
                self.base.write(self.folder)
            self.base.digest(self.dtype or torch.float32)
        self.base.round(self.dtype or torch.float32)

    def check(self) -> None:  # noqa: D102
        if self.is_served:
            sent = self.base.digests or {}
            raise_everywhere(lambda: self.engine.check_base(sent) if self.engine else None)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:  # noqa: D102
        return adapter_tensors(self.model, self.dtype)

    def _write(self, name: str, stream: MeteredStream) -> Path:
        return self.folder.write(name, stream, functools.partial(write_adapter, self.model))

    def _load(self, engine: Engine, path: Path, update: WeightUpdate) -> None:
        engine.load_adapter(path, update)


def policy_parameters(model: Any, grid: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `model_parameters`, merged, as the trainer scores with them: rounded as autocast does."""
    return ((name, on_grid(whole, grid)) for name, whole in model_parameters(model, merges=True))


def stream_metadata(weights: WeightStream, dtype: torch.dtype | None = None) -> TensorMetadata:
    """Return the metadata of the tensors that the stream will yield, in order, without rounding any."""
    return [
        (stored_name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name in weights.form.layout
        for stored_name, tensor in weights.stored(name, dtype)
    ]
