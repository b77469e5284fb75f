"""One sync: bring the engine to the policy's current weights, quantized, and make sure that they got there.

The way of a weight tensor, file by file:

1. `rollout/backend.py`: TRL's backend walks the policy's parameters, each gathered (FSDP, ZeRO-3) and with adapters
   merged.
2. `rollout/sync.py` (here): names the update, and takes digests of what is sent.
3. `quantization/weight_stream.py`: cuts each parameter as the model's checkpoint does, under its names
   (`checkpoint_form.py`), and turns each weight into the tensors of its format, one layer at a time (`stream.py`).
4. `quantization/scheme.py`, `quantization/packing.py`: rounding and packing, by compressed-tensors.
5. `rollout/transports.py`: in this process, over NCCL, or as checkpoint files
   (6. `quantization/storage.py`, which writes and reads them).
7. `rollout/engine/colocated.py` or `served.py`: one call to the engine's workers.
8. `rollout/engine/worker.py`: vLLM's own reload, in the worker.
9. `rollout/checks/tensors.py`: digests on arrival, and what layers hold afterwards.
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

from trl_qurl.quantization.kv_cache import FP8_CACHES
from trl_qurl.quantization.stream import NamedTensors, Observer
from trl_qurl.quantization.weight_stream import WeightStream
from trl_qurl.rollout.adapter import adapter_tensors
from trl_qurl.rollout.checks.probe import STEPS, ProbeJudge, probe_prompts, run_probe
from trl_qurl.rollout.checks.tensors import DigestRecorder, compare_digests, find_not_finite, require_finite
from trl_qurl.rollout.engine.interface import FRESH, Continuation, Digests, TensorMetadata, WeightUpdate
from trl_qurl.rollout.errors import ServerError, SyncError
from trl_qurl.rollout.recovery import agreed
from trl_qurl.rollout.settings import RolloutSettings
from trl_qurl.rollout.transports import Parameters, Shipment, Transport
from trl_qurl.rollout.weight_change import WeightChangeTracker


@dataclass
class RolloutCost:
    """What rollouts cost this process."""

    quantize_s: float = 0.0  # gathering and rounding
    sync_s: float = 0.0  # whole syncs without the probe; contains `quantize_s`, and digests where there are any
    check_s: float = 0.0  # digests and probes
    sent_bytes: int = 0  # of tensors made for the engine
    recoveries: int = 0  # from faults of a server
    generate_s: float = 0.0
    tokens: int = 0  # of completions


class WeightSync:
    """Keeps one engine at the policy's weights."""

    _merges_adapter = True  # for a probe

    def __init__(
        self,
        model: Any,
        weights: WeightStream,  # of this model
        transport: Transport,
        settings: RolloutSettings,
        sharding: DistributedBackend,  # how the launcher shards the policy
        global_step: Callable[[], int],  # optimizer steps done
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
        self._announced: TensorMetadata | None = None
        self._not_finite: list[str] = []  # tensors of the policy that hold NaN or infinity
        is_main = PartialState().is_main_process
        self._tracker = WeightChangeTracker(
            settings.weight_metrics_interval, settings.scheme, is_main, weights.smoothing
        )
        self._probe = ProbeJudge()

    def push(self, parameters: Parameters, cost: RolloutCost, is_repeated: bool = False) -> dict[str, float]:
        """Bring the engine to the policy's current weights. A collective operation.

        What it costs is added to `cost`. Returns metrics of the weights and the probe, where this sync was measured or
        probed. Raises `SyncError` if the engine does not hold what was sent, and `RuntimeError` if it could not load
        it (`ServerError` from a server). One that `is_repeated` for a server that failed is checked whatever the
        interval, and measures nothing.
        """
        started = time.perf_counter()
        if not is_repeated:
            self._tracker.begin_sync()
            if self._weights.smoothing is not None:
                self._weights.smoothing.begin_sync()
        interval = self._settings.sync_check_interval
        checked = is_repeated or (interval > 0 and self._count % interval == 0)
        self._count += 1
        self._not_finite.clear()
        self.version = f"{self._run}-step{self._global_step()}-sync{self._count}"
        update = WeightUpdate(self.version, digest=checked)
        compared = checked and self._transport.is_source
        observer = None if is_repeated else self._tracker.observe
        sent = DigestRecorder(self._tensors(parameters, cost, observer), enabled=compared)
        shipment = Shipment(sent, update, parameters, lambda: self._announce(parameters))
        received = self._transport.deliver(shipment)

        def verify() -> None:
            require_finite(self._not_finite)
            for digests in received if compared else ():
                compare_digests(sent.digests, digests)
            if compared and self._transport.engine:
                self._transport.engine.compare_digests(sent.digests)
            self._require_version()

        agreed(verify, self._settings.is_served)
        metrics = self._tracker.end_sync()
        cost.sync_s += time.perf_counter() - started
        cost.check_s += sent.seconds
        if checked and self._settings.sync_probe:
            started = time.perf_counter()
            metrics |= self._check_probe()
            cost.check_s += time.perf_counter() - started
        return metrics

    def require_version(self) -> None:
        """Raise `SyncError` if the engine no longer holds the weights of the last sync. A collective operation.

        It is a `ServerError` if the server was restarted.
        """
        agreed(self._require_version, self._settings.is_served)

    def _require_version(self) -> None:
        engine = self._transport.engine
        held = self.version if engine is None else engine.version()
        if held == FRESH:
            raise ServerError(f"The server was restarted: it holds {held!r} weights, not {self.version!r}.")
        if held != self.version:
            raise SyncError(
                f"The engine holds the weights {held!r}, not {self.version!r} which this run sent: another run uses "
                "it. Give every run a server of its own, and resume from the last checkpoint."
            )

    def _tensors(
        self, parameters: Parameters, cost: RolloutCost, observer: Observer | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """What is sent, with its cost counted."""
        tensors = self._made(parameters, observer)
        while True:
            started = time.perf_counter()
            item = next(tensors, None)
            cost.quantize_s += time.perf_counter() - started
            if item is None:
                return
            cost.sent_bytes += item[1].nbytes
            yield item

    def _made(self, parameters: Parameters, observer: Observer | None) -> Iterator[tuple[str, torch.Tensor]]:
        """What is sent, made from a pass over the parameters."""
        tensors = self._weights.tensors(
            find_not_finite(parameters(), self._not_finite), observer, self._transport.sent_dtype
        )
        if is_peft_model(self._model):
            # vLLM may hold a tensor until its layer is complete; by then the adapter is unmerged from the parameter.
            tensors = ((name, tensor.clone()) for name, tensor in tensors)
        return tensors

    def _announce(self, parameters: Parameters) -> TensorMetadata:
        """What the stream will hold, for a server that must know it beforehand; the parameters are walked once."""
        if not self._settings.is_served:
            return []
        if self._announced is None:
            self._announced = announce(parameters(), self._weights, self._transport.sent_dtype)
        return self._announced

    def _check_probe(self) -> dict[str, float]:
        """Compare the engine with the trainer's own quantized forward pass, where the trainer can make one."""
        if self._sharding.is_zero3 or self._sharding.fsdp_version == 1:
            return {}  # a layer's weight is not whole where the pass would quantize it
        probe = [agreed(self._ask_engine, self._settings.is_served)]
        if self._settings.is_served and self._sharding.fsdp_version == 2:
            broadcast_object_list(probe, from_process=0)  # each process holds a part of the weights
        if probe[0] is None:
            return {}
        prompts, continuations, cache = probe[0]
        layers, scheme, rounds_cache = self._weights.layers, self._settings.scheme, cache in FP8_CACHES
        adapted, smoothing = self._merges_adapter, self._weights.smoothing
        with smoothing.paused() if smoothing else nullcontext():  # arbitrary tokens, and disturbed
            given = (prompts, continuations, layers, scheme, adapted, rounds_cache, smoothing, self._weights.grid)
            result = run_probe(self._model, *given)
        self._probe.judge(result)
        return {"sync/probe_distance": result.distance, "sync/probe_ratio": result.ratio}

    def _ask_engine(self) -> tuple[list[list[int]], list[Continuation], str] | None:
        """The prompts of a probe, the engine's continuations, and the format of its key-value cache."""
        engine = self._transport.engine
        if engine is None:
            return None
        described = engine.describe()
        vocabulary_size = self._base.config.get_text_config().vocab_size
        prompts = probe_prompts(vocabulary_size, described.block_size, described.max_model_len)
        return prompts, engine.continue_greedily(prompts, STEPS), described.kv_cache_dtype


class AdapterSync(WeightSync):
    """Keeps one engine, which has the frozen base, at the policy's LoRA adapter.

    `base_digests` are those that a server's start must have; they are known in the main process.
    """

    _merges_adapter = False

    def __init__(self, *args: Any, base_digests: Digests | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._base_digests = base_digests
        self._checks_base = self._settings.is_served and self._settings.sync_check_interval > 0

    def push(self, parameters: Parameters, cost: RolloutCost, is_repeated: bool = False) -> dict[str, float]:
        """As the parent's. A server's base is checked first, once and after each fault."""
        if self._checks_base or (is_repeated and self._settings.is_served):
            started = time.perf_counter()
            agreed(self._check_base)
            self._checks_base = False
            cost.check_s += time.perf_counter() - started
        return super().push(parameters, cost, is_repeated)

    def _check_base(self) -> None:
        if self._transport.engine is not None and self._base_digests is not None:
            self._transport.engine.check_base(self._base_digests)

    def _made(self, *args: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return find_not_finite(adapter_tensors(self._model, self._transport.sent_dtype), self._not_finite)


def announce(named_parameters: NamedTensors, weights: WeightStream, dtype: torch.dtype | None) -> TensorMetadata:
    """Return the metadata of the tensors that the stream will yield, in their order, without rounding any."""
    return [
        (stored.name, str(stored.dtype).removeprefix("torch."), list(stored.shape))
        for name, _ in named_parameters
        for stored in weights.stored(name, dtype)
    ]
