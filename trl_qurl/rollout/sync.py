"""One sync: send the policy's current weights, quantized, to the engine, and verify that they
arrived.

The path of a weight tensor, file by file:

1. `quantization/merging.py`: iterates over the policy's parameters, gathered (FSDP, ZeRO-3), with
   adapters merged.
2. `rollout/sync.py` (this file): names the update, and meters its stream of tensors (bytes,
   seconds, digests).
3. `quantization/stream.py`: splits parameters as the model's checkpoint does
   (`checkpoint_form.py`), and turns each weight into the tensors of its format, one layer at a
   time.
4. `quantization/smoothing.py`: folds scales into the weights of INT8 layers and of what feeds them.
5. `quantization/scheme.py`, `quantization/packing.py`: rounding and packing, with
   compressed-tensors.
6. `rollout/routes.py`: sends them as a stream, or as files (`rollout/directory.py`,
   `quantization/storage.py`).
7. `rollout/engine/colocated.py` or `served.py`: one call to the engine's workers. A stream to a
   server goes over NCCL (`broadcast.py`).
8. `rollout/engine/worker.py`: vLLM's own reload, in the worker, with fixes (`cpu.py`, `cuda.py`).
9. `rollout/checks/reload.py`: layers that the reload left incomplete.
10. `rollout/checks/tensors.py`: digests on arrival. `rollout/checks/probe.py`: what the engine
    computes with them.
"""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.tensor import DTensor
from trl.distributed import DistributedBackend

from trl_qurl.quantization.checkpoint_form import expert_layers
from trl_qurl.quantization.merging import reshard
from trl_qurl.rollout.checks.probe import ask_engine, judge_probe, run_probe
from trl_qurl.rollout.checks.tensors import (
    MeteredStream,
    as_integers,
    bit_sum,
    find_not_finite,
    require_finite,
)
from trl_qurl.rollout.errors import ServerError, SyncError
from trl_qurl.rollout.preparation import RolloutSettings
from trl_qurl.rollout.recovery import raise_everywhere
from trl_qurl.rollout.routes import Route
from trl_qurl.rollout.wire import FRESH, WeightUpdate

Fingerprint = tuple[list[int], bytes, list[str]]


@dataclass
class RolloutCost:
    """The cost of rollouts in this process, and what was measured on the way."""

    quantize_s: float = 0.0  # gathering and rounding
    # whole syncs without the probe; includes `quantize_s`, any digests and a fingerprint
    sync_s: float = 0.0
    check_s: float = 0.0  # digests on both sides, fingerprints and probes
    sent_bytes: int = 0  # total size of the tensors made for the engine
    recoveries: int = 0  # from server faults
    generate_s: float = 0.0
    tokens: int = 0  # of completions
    metrics: dict[str, float] = field(default_factory=dict)  # such as those of a probe, by name


@dataclass(eq=False)
class WeightSync:
    """Keeps the engine at the end of a route in sync with the policy."""

    route: Route
    settings: RolloutSettings
    sharding: DistributedBackend  # how the launcher shards the policy
    global_step: Callable[[], int]  # optimizer steps so far

    def __post_init__(self) -> None:
        self.version = "none"
        self._sent: Any = None  # the step and the fingerprint of the weights that were sent last
        self.unchanged_since = 0  # step of the first sync that sent the same weights as the last
        self._run = uuid.uuid4().hex[:8]
        self._count = 0
        self._probe_limit: float | None = None  # set by the first check

    def push(self, cost: RolloutCost, is_repeated: bool = False) -> None:
        """Send the policy's current weights to the engine. A collective operation.

        Adds to `cost`. Raises `SyncError` if the engine does not hold the weights that were sent,
        and `RuntimeError` if it could not load them (`ServerError` from a server). A retry after a
        server fault (`is_repeated`) is always checked and probed, regardless of the interval.
        """
        route, interval = self.route, self.settings.sync_check_interval
        if route.weights.smoothing is not None and not is_repeated:
            route.weights.smoothing.begin_sync()
        is_checked = interval > 0 or is_repeated
        # Digests would hide a race between a receiver's streams, and NCCL has not shown on a GPU
        # that there is none.
        is_unproven = route.is_served and route.folder is None
        is_probed = is_checked and (is_repeated or is_unproven or self._count % interval == 0)
        if is_repeated or (is_checked and self._count == 0):
            started = time.perf_counter()
            route.check()
            cost.check_s += time.perf_counter() - started
        started = time.perf_counter()
        self._count += 1
        self.version = f"{self._run}-step{self.global_step()}-sync{self._count}"
        not_finite: list[str] = []  # tensors with NaN or infinity
        tensors = find_not_finite(route.tensors(), not_finite)
        # Of several processes with an engine, only those that write its files can compare them with
        # what it received.
        is_source = route.engine is not None and (route.folder is None or route.folder.is_writer)
        stream = MeteredStream(tensors, {} if is_checked and is_source else None)
        noise = f"seed{self.settings.seed}-step{self.global_step()}" if route.is_served else None
        route.send(WeightUpdate(self.version, is_checked, noise=noise), stream)

        def verify() -> None:
            require_finite(not_finite)
            if stream.digests is not None and route.engine:
                cost.check_s += route.engine.compare_digests(stream.digests)
            self.require_version()

        raise_everywhere(verify, route.is_served)
        if torch.accelerator.is_available():
            # the engine has streams of its own, and seconds should include its copies
            torch.accelerator.synchronize()
        self._remember(self.global_step(), self._fingerprint(cost))
        cost.sync_s += time.perf_counter() - started
        cost.quantize_s += stream.source_s
        cost.check_s += stream.digest_s
        cost.sent_bytes += stream.nbytes
        if is_probed:
            started = time.perf_counter()
            cost.metrics |= self._check_probe()
            cost.check_s += time.perf_counter() - started

    def _remember(self, step: int, sent: Fingerprint) -> None:
        # Without version counters: an optimizer with a learning rate of 0 counts one up as well.
        # another training starts at 0 again
        is_later = self._sent is not None and step >= self._sent[0]
        is_unchanged = is_later and sent[1:] == self._sent[1][1:]
        self.unchanged_since = self.unchanged_since if is_unchanged else step
        self._sent = (step, sent)

    def unchanged_steps(self) -> range:
        """Return the optimizer steps before the last sync that have changed no weight since an
        earlier one.
        """
        last = self.unchanged_since if self._sent is None else self._sent[0]
        return range(self.unchanged_since + 1, last + 1)

    def loaded_step(self, cost: RolloutCost) -> int:
        """Return the current step if the policy has the weights that were sent last. A collective
        operation.
        """
        now = (self.global_step(), self._fingerprint(cost))
        return now[0] if all(gather_object([now == self._sent])) else -1

    def _fingerprint(self, cost: RolloutCost) -> Fingerprint:
        started = time.perf_counter()
        result = fingerprint(self.route.model)
        cost.check_s += time.perf_counter() - started
        return result

    def require_version(self) -> None:
        """Raise `SyncError` unless the engine holds the weights of the last sync; `ServerError`
        after a restart.
        """
        engine = self.route.engine
        version = self.version if engine is None else engine.version()
        if version == FRESH:
            raise ServerError(
                f"The server was restarted: it holds {version!r} weights, not {self.version!r}."
            )
        if version != self.version:
            raise SyncError(
                f"The engine holds the weights {version!r}, not {self.version!r}, which this run "
                "sent: another run uses it. Use one server per run, and resume from the last "
                "checkpoint."
            )

    def _check_probe(self) -> dict[str, float]:
        """Compare the engine with the trainer's own quantized forward pass, if it can run one."""
        route, model, weights = self.route, self.route.model, self.route.weights
        if self.sharding.is_zero3:
            return {}  # a layer's weight is still sharded where the pass would quantize it
        if expert_layers(weights.plan.schemes):
            return {}  # the trainer computes experts exactly
        size = model.config.get_text_config().vocab_size
        answer = [
            raise_everywhere(
                lambda: ask_engine(route.engine, size) if route.engine else None, route.is_served
            )
        ]
        if route.is_served and self.sharding.fsdp_version == 2:
            # each process holds a shard of the weights
            broadcast_object_list(answer, from_process=0)

        def judge() -> dict[str, float]:
            if answer[0] is None:
                return {}
            result = run_probe(model, answer[0], weights, route.is_merged)
            self._probe_limit = judge_probe(result, self._probe_limit)
            return {"sync/probe_distance": result.distance, "sync/probe_ratio": result.ratio}

        return raise_everywhere(judge, route.is_served)


def fingerprint(model: Any) -> Fingerprint:
    """Return what tells weights from later ones: version counters, sums of bits and some values,
    and what adapters do.

    Writing to `.data` counts no version, but changes the sum. Values, because two changes may
    cancel in a sum.
    """
    reshard(model)
    shards = [getattr(each, "ds_tensor", each).detach() for each in model.parameters()]  # ZeRO-3's
    tensors = [each.to_local() if isinstance(each, DTensor) else each for each in shards]
    values = [bit_sum(each).reshape(1).to(model.device) for each in tensors]
    for integers in map(as_integers, tensors):
        sampled = torch.arange(
            0, integers.numel(), max(1, integers.numel() // 64), device=integers.device
        )
        values.append(integers.take(sampled).to(model.device, torch.int64))
    adapters = [
        each
        for each in model.modules()
        if hasattr(each, "base_layer") or hasattr(each, "modules_to_save")
    ]
    in_use = [
        str((a.disable_adapters, a.active_adapters, getattr(a, "scaling", None))) for a in adapters
    ]
    return (
        [each._version for each in model.parameters()],
        torch.cat(values).cpu().numpy().tobytes(),
        in_use,
    )
