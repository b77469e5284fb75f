"""The routes of weights to an engine: a stream, files of a checkpoint, an adapter alone.

`choose` takes one when an engine starts. From then on, every sync asks the same of each: `tensors`
to send, `send` to load them, and `check_base` for what the engine has and is not sent.
"""

import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model

from trl_qurl.quantization.checkpoint_form import NamedTensors
from trl_qurl.quantization.merging import Tensors, model_parameters
from trl_qurl.quantization.rounded_base import round_base
from trl_qurl.quantization.storage import read_tensors
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.rollout.adapter import adapter_rank, adapter_tensors, engine_rank, write_adapter
from trl_qurl.rollout.checks.adapter import adapter_obstacle, check_rounding, choose_adapter
from trl_qurl.rollout.checks.tensors import MeteredStream, base_digests
from trl_qurl.rollout.directory import CheckpointFolder
from trl_qurl.rollout.errors import SyncError
from trl_qurl.rollout.group import Group
from trl_qurl.rollout.preparation import RolloutSettings
from trl_qurl.rollout.substitution import substitute
from trl_qurl.rollout.wire import Engine, TensorMetadata, WeightUpdate

logger = get_logger(__name__)  # of the main process


@dataclass(eq=False)
class Route(ABC):
    """A route of weights from one policy to one engine. All methods are collective operations."""

    model: Any
    weights: WeightStream  # of this model
    group: Group  # the processes at this end of the route
    folder: CheckpointFolder | None = None  # of the files that the engine loads
    # whether the trainer computes with a frozen base's rounded values as well
    rounds_base: bool = False
    # an `Engine`; `None` outside the main process if the group shares one
    engine: Any = field(init=False, default=None)
    # of unquantized tensors; `None` does not cast them
    dtype: torch.dtype | None = field(init=False, default=None)

    is_merged = True  # whether an adapter is merged into the weights
    # Of files, how many at a time: one that is written, and one that the engine may still read.
    checkpoints = 2

    def starting_tensors(self) -> Tensors:
        """Return the tensors of the checkpoint that the engine starts from."""
        return self.weights.tensors(model_parameters(self.model, True, self.weights.grid))

    def attach(self, engine: Engine | None, dtype: str | None) -> None:
        """Use an engine that has started, and send tensors in its dtype."""
        self.engine = engine
        self.dtype = getattr(torch, dtype) if dtype else None

    def check_base(self) -> None:  # noqa: B027
        """Raise `SyncError` if a server lacks what is not sent."""

    def tensors(self) -> Tensors:
        """Return the tensors to send, from one pass over the parameters."""
        return self.weights.tensors(
            model_parameters(self.model, True, self.weights.grid), self.dtype
        )

    @abstractmethod
    def send(self, update: WeightUpdate, stream: MeteredStream) -> None:
        """Load the metered `tensors` into the engine; raise in all processes what it raises."""


class StreamRoute(Route):
    """A stream, read in this process by a colocated engine, or received over NCCL by a server."""

    checkpoints = 0

    def send(self, update: WeightUpdate, stream: MeteredStream) -> None:  # noqa: D102
        if self.group.is_together:
            update = update._replace(metadata=stream_metadata(self.weights, self.dtype))
        # The other processes gather with this one until the end.
        drain: Callable[[], object] = functools.partial(deque, stream, maxlen=0)

        def load() -> None:
            if self.engine is not None:
                self.engine.load_stream(stream, update)
            drain()

        self.group.run(load, drain)


class CheckpointRoute(Route):
    """Files of a checkpoint, for any device and any processes that share a file system."""

    folder: CheckpointFolder
    _sent = 0  # checkpoints that the engine has loaded

    def send(self, update: WeightUpdate, stream: MeteredStream) -> None:  # noqa: D102
        # A retry after a fault reuses the name, because a server that only hung may still read from
        # that path.
        path = self._write(f"sync-{self._sent + 1}", stream)
        self.group.from_main(lambda: self._load(path, update))
        self.folder.remove(f"sync-{self._sent}")
        self._sent += 1

    def _write(self, name: str, stream: MeteredStream) -> Path:
        return self.folder.write(name, stream)

    def _load(self, path: Path, update: WeightUpdate) -> None:
        self.engine.load_checkpoint(path, update)


class LLMCompressorRoute(CheckpointRoute):
    """A checkpoint that llm-compressor writes. Our stream is only compared with what arrives."""

    def _write(self, name: str, stream: MeteredStream) -> Path:
        deque(stream, maxlen=0)
        parameters = model_parameters(self.model, True, self.weights.grid)
        return self.folder.write(name, parameters, self._compress)

    def _compress(self, parameters: NamedTensors, path: Path) -> None:
        copies = self.weights.copies(parameters, self.dtype)
        # With a process group, llm-compressor would share its work with the other processes.
        with substitute(torch.distributed, "is_initialized", lambda: False):
            self.folder.writer.write_with_llmcompressor(copies, path)


class AdapterRoute(CheckpointRoute):
    """Files of a LoRA adapter, for an engine that has the frozen base below it, quantized."""

    is_merged = False
    checkpoints = 1  # of the base
    # of the base, if rounding has overwritten the weights it was made from
    checkpoint: Path | None = None
    # of the base that a server must have; only in the main process
    digests: dict[str, str] | None = None

    def starting_tensors(self) -> Tensors:
        """Return the tensors of the quantized base.

        Raises `FileNotFoundError` in the main process if the run's own checkpoint is gone.
        """
        if self.checkpoint is None:
            return self.weights.tensors(model_parameters(self.model), is_exact=True)
        if self.checkpoint.exists():
            return read_tensors(self.checkpoint)
        if not PartialState().is_main_process:
            return iter(())  # this process may not see the file and does not need it
        raise FileNotFoundError(
            f"The quantized base of this run is gone from {self.checkpoint}: keep "
            "rollout_checkpoint_dir until the run ends, or save with merge=True."
        )

    def attach(self, engine: Engine | None, dtype: str | None) -> None:
        """Use an engine that has started. Record its base, then round the trainer's if asked to."""
        super().attach(engine, dtype)
        engine_dtype = self.dtype or torch.float32
        if self.rounds_base:
            started = self.folder.path / "start"  # by a colocated engine
            if self.group.is_together:
                started = self.folder.write("start", self.starting_tensors())
            self.checkpoint = started
        if self.group.is_together:
            tensors = self.starting_tensors()
            if PartialState().is_main_process:
                self.digests = base_digests(tensors, engine_dtype)
            deque(tensors, maxlen=0)
        if self.rounds_base:
            round_base(self.model.get_base_model(), self.weights.plan, engine_dtype)

    def check_base(self) -> None:  # noqa: D102
        self.group.from_main(lambda: self.engine.check_base(self.digests or {}))

    def tensors(self) -> Tensors:  # noqa: D102
        obstacle = adapter_obstacle(self.model)  # since the start
        if obstacle is not None:
            raise SyncError(f"The adapter can no longer be sent alone: {obstacle}.")
        return adapter_tensors(self.model, self.dtype)

    def _write(self, name: str, stream: MeteredStream) -> Path:
        return self.folder.write(name, stream, functools.partial(write_adapter, self.model))

    def _load(self, path: Path, update: WeightUpdate) -> None:
        self.engine.load_adapter(path, update)


ROUTES: dict[str, type[Route]] = {
    "auto": StreamRoute,  # to a colocated engine
    "stream": StreamRoute,
    "checkpoint": CheckpointRoute,
    "llmcompressor": LLMCompressorRoute,
}
"""The routes of whole weights, by the config's `weight_sync`."""


def choose(
    model: Any,
    weights: WeightStream,
    rollout: RolloutSettings,
    server: Any = None,
    is_sharded: bool = False,
) -> type[Route]:
    """Choose the route to an engine, and log why.

    Args:
        model: The policy.
        weights: The stream of its weights.
        rollout: The run's settings.
        server: A `ServedEngine`, or `None` for a colocated engine.
        is_sharded: Whether processes hold parts of the policy.

    Raises:
        ValueError: The route that the settings request is not possible.
    """
    requested = "adapter" if rollout.round_base else rollout.weight_sync
    obstacle = adapter_obstacle(model)
    rank = 0 if obstacle else adapter_rank(model)
    if obstacle is None and weights.smoothing is not None:
        obstacle = "smooth_activations folds scales into whole weights at every sync (remove it)"
    served_rank = server.describe().max_lora_rank if server else None
    restart = server.command(engine_rank(rank)) if server and rank else ""
    is_alone, reason = choose_adapter(requested, obstacle, rank, served_rank, restart)
    if is_peft_model(model):
        way = "The adapter is sent alone" if is_alone else "The adapter is merged"
        logger.info("%s: %s.", way, reason)
    if rollout.round_base:
        check_rounding(model, weights.plan)
    if is_alone:
        return AdapterRoute
    if server is None:
        return ROUTES[requested]
    device = PartialState().device
    name, reason = choose_route(requested, device, server.stream_obstacle, is_sharded)
    logger.info("Sending weights to %s by %s: %s.", server.base_url, name, reason)
    return ROUTES[name]


def choose_route(
    requested: str, device: torch.device, obstacle: str | None, is_sharded: bool
) -> tuple[str, str]:
    """Choose how to send whole weights to a server, and give the reason.

    `requested` is the config's `weight_sync`, `device` the trainer's, `obstacle` why the server
    accepts no stream, and `is_sharded` whether processes hold parts of the policy. Raises
    `ValueError` if a requested stream is not possible.
    """
    if device.type != "cuda":
        obstacle = f"NCCL needs a CUDA device, and the trainer's is {device.type!r}"
    if requested == "stream" and obstacle:
        raise ValueError(
            f"weight_sync='stream' is not possible: {obstacle}. Start the server with `trl-qurl "
            "serve` on a separate GPU, or set weight_sync='checkpoint' (or 'auto')."
        )
    if requested != "auto":
        return requested, f"weight_sync={requested!r} requests it"
    if is_sharded and not obstacle:
        obstacle = "streaming a sharded policy is untested on GPUs (weight_sync='stream' forces it)"
    if obstacle:
        return "checkpoint", obstacle
    return "stream", "the trainer and the server both have NCCL"


def stream_metadata(weights: WeightStream, dtype: torch.dtype | None = None) -> TensorMetadata:
    """Return the metadata of what the stream will yield, in order, without rounding anything."""
    return [
        (stored_name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name in weights.form.layout
        for stored_name, tensor in weights.stored(name, dtype)
    ]
