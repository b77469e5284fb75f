"""One sync: send the policy's current weights, quantized, to the engine, and verify that they arrived.

The path of a weight tensor, file by file:

1. `quantization/merging.py`: iterates over the policy's parameters, gathered (FSDP, ZeRO-3), with adapters merged.
2. `rollout/sync.py` (this file): names the update, and meters its stream of tensors (bytes, seconds, digests).
3. `quantization/stream.py`: splits parameters as the model's checkpoint does (`checkpoint_form.py`), and turns each
   weight into the tensors of its format, one layer at a time.
4. `quantization/scheme.py`, `quantization/packing.py`: rounding and packing, with compressed-tensors.
5. `rollout/directory.py`, `quantization/storage.py`: files of a checkpoint or an adapter, unless tensors are streamed.
6. `rollout/engine/colocated.py` or `served.py`: one call to the engine's workers.
7. `rollout/engine/worker.py`: vLLM's own reload, in the worker.
8. `rollout/checks/tensors.py`: digests on arrival.
"""

import functools
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.tensor import DTensor
from trl.distributed import DistributedBackend

from trl_qurl.quantization.checkpoint_form import expert_layers
from trl_qurl.quantization.merging import model_parameters, reshard
from trl_qurl.quantization.stream import WeightStream, on_grid
from trl_qurl.rollout.adapter import FrozenBase, adapter_tensors, write_adapter
from trl_qurl.rollout.checks.probe import ask_engine, judge_probe, run_probe
from trl_qurl.rollout.checks.tensors import MeteredStream, find_not_finite, require_finite
from trl_qurl.rollout.directory import CheckpointFolder
from trl_qurl.rollout.errors import ServerError, SyncError
from trl_qurl.rollout.preparation import RolloutSettings
from trl_qurl.rollout.recovery import raise_everywhere
from trl_qurl.rollout.wire import FRESH, Engine, TensorMetadata, WeightUpdate


@dataclass
class RolloutCost:
    """The cost of rollouts in this process, and what was measured on the way."""

    quantize_s: float = 0.0  # gathering and rounding
    sync_s: float = 0.0  # whole syncs without the probe; includes `quantize_s` and any digests
    check_s: float = 0.0  # digests and probes
    sent_bytes: int = 0  # total size of the tensors made for the engine
    recoveries: int = 0  # from server faults
    generate_s: float = 0.0
    tokens: int = 0  # of completions
    metrics: dict[str, float] = field(default_factory=dict)  # such as those of a probe, by name


@dataclass(eq=False)
class WeightSync:
    """Keeps one engine in sync with the policy's weights, or with its LoRA adapter if the engine has the `base`.

    A colocated engine reads the stream of tensors in this process, and a server's workers receive it over NCCL. With a
    `folder`, the stream is written to files instead, which works on any device and between any processes that share a
    file system. If llm-compressor writes them, the stream only serves to check the result.
    """

    model: Any
    weights: WeightStream  # of this model
    engine: Engine | None  # `None` in processes that leave a server to the main one
    settings: RolloutSettings
    sharding: DistributedBackend  # how the launcher shards the policy
    global_step: Callable[[], int]  # optimizer steps so far
    sent_dtype: torch.dtype | None = None  # of unquantized tensors; `None` does not cast them
    folder: CheckpointFolder | None = None
    base: FrozenBase | None = None  # of an adapter that is sent alone

    def __post_init__(self) -> None:
        self.version = "none"
        self._sent: Any = None  # the step and the fingerprint of the weights that were sent last
        self._run = uuid.uuid4().hex[:8]
        self._count = 0
        self._files = 0  # checkpoints or adapters that the engine has loaded
        self._metadata: TensorMetadata | None = None  # of a stream to a server's workers
        self._not_finite: list[str] = []  # policy tensors with NaN or infinity
        self._probe_limit: float | None = None  # set by the first check
        self._uses_llmcompressor = self.settings.weight_sync == "llmcompressor"
        if self._uses_llmcompressor:
            self.sent_dtype = None  # it writes tensors in the policy's own dtype, and the stream checks them

    def push(self, cost: RolloutCost, is_repeated: bool = False) -> None:
        """Send the policy's current weights to the engine. A collective operation.

        Adds to `cost`. Raises `SyncError` if the engine does not hold the weights that were sent, and `RuntimeError`
        if it could not load them (`ServerError` from a server). A retry after a server fault (`is_repeated`) is always
        checked and probed, regardless of the interval.
        """
        if self.weights.smoothing is not None and not is_repeated:
            self.weights.smoothing.begin_sync()
        interval = self.settings.sync_check_interval
        is_checked = interval > 0 or is_repeated
        is_probed = is_checked and (is_repeated or self._count % interval == 0)
        self._check_base(cost, is_repeated)
        started = time.perf_counter()
        self._count += 1
        self._not_finite.clear()
        self.version = f"{self._run}-step{self.global_step()}-sync{self._count}"
        # Of several processes with an engine, only those that write its files can compare them with what it received.
        is_source = self.engine is not None and (self.folder is None or self.folder.is_writer)
        stream = MeteredStream(self._tensors(), {} if is_checked and is_source else None)
        noise = f"seed{self.settings.seed}-step{self.global_step()}" if self.settings.is_served else None
        update = WeightUpdate(self.version, is_checked, noise=noise)
        if self.folder is None:
            self._stream(update, stream)
        else:
            self._send_files(update, stream, self.folder)

        def verify() -> None:
            require_finite(self._not_finite)
            if stream.digests is not None and self.engine:
                self.engine.compare_digests(stream.digests)
            self.require_version()

        raise_everywhere(verify, self.settings.is_served)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the engine has streams of its own, and seconds should include its copies
        self._sent = (self.global_step(), fingerprint(self.model))
        cost.sync_s += time.perf_counter() - started
        cost.quantize_s += stream.source_s
        cost.check_s += stream.digest_s
        cost.sent_bytes += stream.nbytes
        # Digests would hide a race between a receiver's streams, and no GPU has shown yet that there is none.
        if is_probed or (interval > 0 and self.settings.is_served and self.folder is None):
            started = time.perf_counter()
            cost.metrics |= self._check_probe()
            cost.check_s += time.perf_counter() - started

    def loaded_step(self) -> int:
        """Return the current step if the policy has the weights that were sent last. A collective operation."""
        now = (self.global_step(), fingerprint(self.model))
        return now[0] if all(gather_object([now == self._sent])) else -1

    def require_version(self) -> None:
        """Raise `SyncError` unless the engine holds the weights of the last sync; `ServerError` after a restart."""
        version = self.version if self.engine is None else self.engine.version()
        if version == FRESH:
            raise ServerError(f"The server was restarted: it holds {version!r} weights, not {self.version!r}.")
        if version != self.version:
            raise SyncError(
                f"The engine holds the weights {version!r}, not {self.version!r}, which this run sent: another run "
                "uses it. Use one server per run, and resume from the last checkpoint."
            )

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors to send, from one pass over the parameters."""
        if self.base is not None:
            return find_not_finite(adapter_tensors(self.model, self.sent_dtype), self._not_finite)
        parameters = policy_parameters(self.model, self.weights.grid)
        return find_not_finite(self.weights.tensors(parameters, self.sent_dtype), self._not_finite)

    def _stream(self, update: WeightUpdate, stream: MeteredStream) -> None:
        """Send tensors to the engine; processes without one help gather them, and fail together with the others."""
        if self.settings.is_served and self._metadata is None:
            self._metadata = stream_metadata(self.weights, self.sent_dtype)

        drain = functools.partial(
            deque[Any], stream, maxlen=0
        )  # the other processes gather with this one until the end

        def send() -> None:
            if self.engine is not None:
                self.engine.load_stream(stream, update._replace(metadata=self._metadata))
            drain()

        raise_everywhere(send, self.settings.is_served, drain)

    def _send_files(self, update: WeightUpdate, stream: MeteredStream, folder: CheckpointFolder) -> None:
        """Write a checkpoint, or the adapter alone, and make the engine load it."""
        # A retry after a fault reuses the name, because a server that only hung may still read from that path.
        name = f"sync-{self._files + 1}"
        if self._uses_llmcompressor:
            deque(stream, maxlen=0)  # read for digests only
            parameters = policy_parameters(self.model, self.weights.grid)
            path = folder.write(name, parameters, folder.writer.write_with_llmcompressor)
        elif self.base is not None:
            path = folder.write(name, stream, functools.partial(write_adapter, self.model))
        else:
            path = folder.write(name, stream)

        def load() -> None:
            if self.engine is not None:
                (self.engine.load_checkpoint if self.base is None else self.engine.load_adapter)(path, update)

        raise_everywhere(load, self.settings.is_served)
        folder.remove(f"sync-{self._files}")
        self._files += 1

    def _check_base(self, cost: RolloutCost, is_repeated: bool) -> None:
        """Compare a server's base with this run's, before the first sync and after each fault."""
        base, engine = self.base, self.engine
        is_first = self._count == 0 and self.settings.sync_check_interval > 0
        if base is None or not self.settings.is_served or not (is_first or is_repeated):
            return
        started = time.perf_counter()
        raise_everywhere(lambda: engine.check_base(base.digests) if engine and base.digests else None)
        cost.check_s += time.perf_counter() - started

    def _check_probe(self) -> dict[str, float]:
        """Compare the engine with the trainer's own quantized forward pass, if it can run one."""
        if self.sharding.is_zero3:
            return {}  # a layer's weight is still sharded where the pass would quantize it
        if expert_layers(self.weights.plan.schemes):
            return {}  # the trainer computes experts exactly
        engine, size = self.engine, self.model.config.get_text_config().vocab_size
        answer = [raise_everywhere(lambda: ask_engine(engine, size) if engine else None, self.settings.is_served)]
        if self.settings.is_served and self.sharding.fsdp_version == 2:
            broadcast_object_list(answer, from_process=0)  # each process holds a shard of the weights

        def judge() -> dict[str, float]:
            if answer[0] is None:
                return {}
            result = run_probe(self.model, answer[0], self.weights, is_merged=self.base is None)
            self._probe_limit = judge_probe(result, self._probe_limit)
            return {"sync/probe_distance": result.distance, "sync/probe_ratio": result.ratio}

        return raise_everywhere(judge, self.settings.is_served)


def policy_parameters(model: Any, grid: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `model_parameters`, merged, as the trainer scores with them: rounded as autocast does."""
    return ((name, on_grid(whole, grid)) for name, whole in model_parameters(model, merges=True))


def fingerprint(model: Any) -> tuple[list[int], bytes, list[str]]:
    """Return what tells weights from later ones: version counters, some values and sums, and what adapters do.

    Values, because writing to `.data` counts no version.
    """
    reshard(model)
    shards = [getattr(each, "ds_tensor", each).detach() for each in model.parameters()]  # ZeRO-3's
    flat = [(each.to_local() if isinstance(each, DTensor) else each).flatten() for each in shards]
    values = [each[:: max(1, len(each) // 64)].to(model.device, torch.float32) for each in flat]
    values += [each.sum(dtype=torch.float32).reshape(1).to(model.device) for each in flat]
    adapters = [each for each in model.modules() if hasattr(each, "base_layer") or hasattr(each, "modules_to_save")]
    in_use = [str((a.disable_adapters, a.active_adapters, getattr(a, "scaling", None))) for a in adapters]
    return [each._version for each in model.parameters()], torch.cat(values).cpu().numpy().tobytes(), in_use


def stream_metadata(weights: WeightStream, dtype: torch.dtype | None = None) -> TensorMetadata:
    """Return the metadata of the tensors that the stream will yield, in order, without rounding any."""
    return [
        (stored_name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name in weights.form.layout
        for stored_name, tensor in weights.stored(name, dtype)
    ]
