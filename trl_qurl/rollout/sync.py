"""One sync: send the policy's current weights, quantized, to the engine, and verify that they arrived.

The path of a weight tensor, file by file:

1. `rollout/backend.py`: TRL's backend iterates over the policy's parameters, gathered (FSDP, ZeRO-3) and with adapters
   merged.
2. `rollout/sync.py` (this file): names the update, and records digests of the tensors that it sends.
3. `quantization/weight_stream.py`: splits each parameter as the model's checkpoint does, under its names
   (`checkpoint_form.py`), and turns each weight into the tensors of its format, one layer at a time (`stream.py`).
4. `quantization/scheme.py`, `quantization/packing.py`: rounding and packing, by compressed-tensors.
5. `rollout/transports.py`: in this process, over NCCL, or as checkpoint files
   (6. `quantization/storage.py`, which writes and reads them).
7. `rollout/engine/colocated.py` or `served.py`: one call to the engine's workers.
8. `rollout/engine/worker.py`: vLLM's own reload, in the worker.
9. `rollout/checks/tensors.py`: digests on arrival, and the values that layers hold afterward.
"""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, is_peft_model
from trl.distributed import DistributedBackend

from trl_qurl.quantization.checkpoint_form import expert_layers
from trl_qurl.quantization.kv_cache import FP8_CACHES
from trl_qurl.quantization.stream import NamedTensors, Observer
from trl_qurl.quantization.weight_stream import WeightStream
from trl_qurl.rollout.adapter import adapter_tensors
from trl_qurl.rollout.checks.probe import STEPS, ProbeJudge, probe_prompts, run_probe
from trl_qurl.rollout.checks.tensors import DigestRecorder, compare_digests, find_not_finite, require_finite
from trl_qurl.rollout.engine.interface import FRESH, Continuation, Digests, TensorMetadata, WeightUpdate
from trl_qurl.rollout.errors import ServerError, SyncError
from trl_qurl.rollout.recovery import raise_everywhere
from trl_qurl.rollout.settings import RolloutSettings
from trl_qurl.rollout.transports import Parameters, Transport, WeightUpdateStream
from trl_qurl.rollout.weight_change import WeightChangeTracker


@dataclass
class RolloutCost:
    """The cost of rollouts in this process."""

    quantize_s: float = 0.0  # gathering and rounding
    sync_s: float = 0.0  # whole syncs without the probe; includes `quantize_s` and any digests
    check_s: float = 0.0  # digests and probes
    sent_bytes: int = 0  # total size of the tensors made for the engine
    recoveries: int = 0  # from server faults
    generate_s: float = 0.0
    tokens: int = 0  # of completions


class WeightSync:
    """Keeps one engine in sync with the policy's weights."""

    _merges_adapter = True  # whether a probe merges it

    def __init__(
        self,
        model: Any,
        weights: WeightStream,  # of this model
        transport: Transport,
        settings: RolloutSettings,
        sharding: DistributedBackend,  # how the launcher shards the policy
        global_step: Callable[[], int],  # optimizer steps so far
    ) -> None:
        self.version = "none"
        self._model = model
        self._base = model.get_base_model() if is_peft_model(model) else model
        self._weights = weights
        self._transport = transport
        self._settings = settings
        self._sharding = sharding
        self._global_step = global_step
        self._run = uuid.uuid4().hex[:8]
        self._count = 0
        self._metadata: TensorMetadata | None = None
        self._not_finite: list[str] = []  # policy tensors with NaN or infinity
        interval = settings.weight_metrics_interval if PartialState().is_main_process else 0
        self._tracker = WeightChangeTracker(interval, settings.scheme, weights.smoothing)
        self._probe = ProbeJudge()

    def push(self, parameters: Parameters, cost: RolloutCost, is_repeated: bool = False) -> dict[str, float]:
        """Send the policy's current weights to the engine. A collective operation.

        Adds to `cost`. Returns metrics of the weights and the probe if this sync measured or probed any. Raises
        `SyncError` if the engine does not hold the weights that were sent, and `RuntimeError` if it could not load
        them (`ServerError` from a server). A retry after a server fault (`is_repeated`) is always checked, regardless
        of the interval, and measures nothing.
        """
        started = time.perf_counter()
        if not is_repeated:
            self._tracker.begin_sync()
            if self._weights.smoothing is not None:
                self._weights.smoothing.begin_sync()
        interval = self._settings.sync_check_interval
        is_checked = is_repeated or (interval > 0 and self._count % interval == 0)
        self._count += 1
        self._not_finite.clear()
        self.version = f"{self._run}-step{self._global_step()}-sync{self._count}"
        update = WeightUpdate(self.version, digest=is_checked)
        is_compared = is_checked and self._transport.is_source
        observer = None if is_repeated else self._tracker.observe
        recorder = DigestRecorder(self._tensors(parameters, cost, observer), enabled=is_compared)
        stream = WeightUpdateStream(recorder, update, parameters, lambda: self._stream_metadata(parameters))
        worker_digests = self._transport.deliver(stream)

        def verify() -> None:
            require_finite(self._not_finite)
            for digests in worker_digests if is_compared else ():
                compare_digests(recorder.digests, digests)
            if is_compared and self._transport.engine:
                self._transport.engine.compare_digests(recorder.digests)
            self._require_version()

        raise_everywhere(verify, self._settings.is_served)
        metrics = self._tracker.end_sync()
        cost.sync_s += time.perf_counter() - started
        cost.check_s += recorder.seconds
        if is_checked and self._settings.sync_probe:
            started = time.perf_counter()
            metrics |= self._check_probe()
            cost.check_s += time.perf_counter() - started
        return metrics

    def require_version(self) -> None:
        """Raise `SyncError` if the engine no longer holds the weights of the last sync. A collective operation.

        Raises `ServerError` instead if the server was restarted.
        """
        raise_everywhere(self._require_version, self._settings.is_served)

    def _require_version(self) -> None:
        engine = self._transport.engine
        version = self.version if engine is None else engine.version()
        if version == FRESH:
            raise ServerError(f"The server was restarted: it holds {version!r} weights, not {self.version!r}.")
        if version != self.version:
            raise SyncError(
                f"The engine holds the weights {version!r}, not {self.version!r}, which this run sent: another run "
                "uses it. Use one server per run, and resume from the last checkpoint."
            )

    def _tensors(
        self, parameters: Parameters, cost: RolloutCost, observer: Observer | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors to send, and count their cost."""
        tensors = self._produce(parameters, observer)
        while True:
            started = time.perf_counter()
            item = next(tensors, None)
            cost.quantize_s += time.perf_counter() - started
            if item is None:
                return
            cost.sent_bytes += item[1].nbytes
            yield item

    def _produce(self, parameters: Parameters, observer: Observer | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors to send, from one pass over the parameters."""
        tensors = self._weights.tensors(
            find_not_finite(parameters(), self._not_finite), observer, self._transport.sent_dtype
        )
        if is_peft_model(self._model):
            # vLLM may keep a tensor until its layer is complete; by then the adapter is unmerged from the parameter.
            tensors = ((name, tensor.clone()) for name, tensor in tensors)
        return tensors

    def _stream_metadata(self, parameters: Parameters) -> TensorMetadata:
        """Return the stream's metadata, which a server needs up front, from one pass over the parameters."""
        if not self._settings.is_served:
            return []
        if self._metadata is None:
            self._metadata = stream_metadata(parameters(), self._weights, self._transport.sent_dtype)
        return self._metadata

    def _check_probe(self) -> dict[str, float]:
        """Compare the engine with the trainer's own quantized forward pass, if it can run one."""
        if self._sharding.is_zero3 or self._sharding.fsdp_version == 1:
            return {}  # a layer's weight is still sharded where the pass would quantize it
        if self._settings.scheme is not None and expert_layers(self._weights.layers):
            return {}  # the trainer computes experts exactly
        probe = [raise_everywhere(self._ask_engine, self._settings.is_served)]
        if self._settings.is_served and self._sharding.fsdp_version == 2:
            broadcast_object_list(probe, from_process=0)  # each process holds a shard of the weights
        if probe[0] is None:
            return {}
        prompts, continuations, cache = probe[0]
        layers, scheme, rounds_cache = self._weights.layers, self._settings.scheme, cache in FP8_CACHES
        merges, smoothing = self._merges_adapter, self._weights.smoothing
        with smoothing.paused() if smoothing else nullcontext():  # the tokens are arbitrary and the outputs disturbed
            inputs = (prompts, continuations, layers, scheme, merges, rounds_cache, smoothing, self._weights.grid)
            result = run_probe(self._model, *inputs)
        self._probe.judge(result)
        return {"sync/probe_distance": result.distance, "sync/probe_ratio": result.ratio}

    def _ask_engine(self) -> tuple[list[list[int]], list[Continuation], str] | None:
        """Return a probe's prompts, the engine's continuations, and the format of its key-value cache."""
        engine = self._transport.engine
        if engine is None:
            return None
        description = engine.describe()
        vocabulary_size = self._base.config.get_text_config().vocab_size
        prompts = probe_prompts(vocabulary_size, description.block_size, description.max_model_len)
        return prompts, engine.continue_greedily(prompts, STEPS), description.kv_cache_dtype


class AdapterSync(WeightSync):
    """Keeps one engine that has the frozen base in sync with the policy's LoRA adapter.

    `base_digests` must match the checkpoint that a server started from. Only the main process has them.
    """

    _merges_adapter = False

    def __init__(self, *args: Any, base_digests: Digests | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._base_digests = base_digests
        self._checks_base = self._settings.is_served and self._settings.sync_check_interval > 0

    def push(self, parameters: Parameters, cost: RolloutCost, is_repeated: bool = False) -> dict[str, float]:
        """Check a server's base, once and after each fault, then sync as the parent does."""
        if self._checks_base or (is_repeated and self._settings.is_served):
            started = time.perf_counter()
            raise_everywhere(self._check_base)
            self._checks_base = False
            cost.check_s += time.perf_counter() - started
        return super().push(parameters, cost, is_repeated)

    def _check_base(self) -> None:
        if self._transport.engine is not None and self._base_digests is not None:
            self._transport.engine.check_base(self._base_digests)

    def _produce(self, *args: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return find_not_finite(adapter_tensors(self._model, self._transport.sent_dtype), self._not_finite)


def stream_metadata(
    named_parameters: NamedTensors, weights: WeightStream, dtype: torch.dtype | None
) -> TensorMetadata:
    """Return the metadata of the tensors that the stream will yield, in order, without rounding any."""
    return [
        (stored.name, str(stored.dtype).removeprefix("torch."), list(stored.shape))
        for name, _ in named_parameters
        for stored in weights.stored(name, dtype)
    ]
