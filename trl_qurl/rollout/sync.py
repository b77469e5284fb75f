"""One sync: send the policy's current weights, quantized, and verify that they have arrived.

Nothing is pushed: vLLM's loader pulls one generator, and each file up to the sixth works when it
asks for the next tensor. The path of a weight:

1. `quantization/merging.py`: iterates over the policy's parameters, gathered (FSDP, ZeRO-3), with
   adapters merged.
2. `quantization/checkpoint_form.py`: renames and splits them as the model's checkpoint does.
3. `quantization/smoothing.py`: folds scales into the weights of INT8 layers and of what feeds them.
4. `quantization/stream.py`, `scheme.py`, `packing.py`: rounds and packs each weight, one layer at a
   time, as compressed-tensors does; on a GPU with one kernel (`kernels.py`).
5. `rollout/checks/tensors.py`: looks for NaN, and meters the stream (bytes, seconds, digests).
6. `rollout/routes.py`: hands the stream over, or writes files (`directory.py`, `storage.py`).
7. `rollout/engine/colocated.py` or `served.py`: one call to the engine's workers. A stream to a
   server goes over NCCL (`broadcast.py`).
8. `rollout/engine/worker.py`: the receiver's digests, around vLLM's own reload, with
   `rollout/repairs/`. One of these makes an error of layers that the reload left incomplete.
9. Back here, `verify`: no NaN, equal digests, the new version.

What the engine computes with the weights shows in the next rollout (`trainers/checks/guard.py`).
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from accelerate.utils import gather_object

from trl_qurl.rollout.checks.fingerprint import Fingerprint, counted_changes, fingerprint
from trl_qurl.rollout.checks.tensors import MeteredStream, find_not_finite, require_finite
from trl_qurl.rollout.cost import RolloutCost
from trl_qurl.rollout.errors import ServerError, SyncError
from trl_qurl.rollout.preparation import RolloutSettings
from trl_qurl.rollout.routes import Route
from trl_qurl.rollout.wire import FRESH, WeightUpdate

MEMORY_ADVICE = (
    "The trainer and vLLM share this GPU, and a sync needs some memory on top: set a lower "
    "vllm_gpu_memory_utilization, or vllm_enable_sleep_mode=True."
)


class SentWeights(NamedTuple):
    """The policy as it was when its weights were sent."""

    step: int  # optimizer steps
    fingerprint: Fingerprint


@dataclass(eq=False)
class WeightSync:
    """Keeps the engine at the end of a route in sync with the policy."""

    route: Route
    settings: RolloutSettings
    cost: RolloutCost  # to which each sync adds its own
    global_step: Callable[[], int]  # optimizer steps so far

    def __post_init__(self) -> None:
        self.version = "none"
        # Whether tokens have yet to show that the engine computes the policy's function.
        self.needs_proof = False
        self.unchanged_since = 0  # step of the first sync that sent the same weights as the last
        self._sent: SentWeights | None = None
        self.is_unused = False  # whether nothing was sampled from these weights yet
        self._run = uuid.uuid4().hex[:8]
        self._count = 0

    def push(self, is_repeated: bool = False) -> None:
        """Send the policy's current weights to the engine. A collective operation.

        A retry after a server fault (`is_repeated`) is always checked, regardless of the interval.
        Raises `SyncError` if the engine does not hold the weights that were sent, and
        `RuntimeError` if it could not load them (`ServerError` from a server).
        """
        route = self.route
        # An engine in this process is handed the tensors themselves: its digests would be of ours.
        travels = route.group.is_together or route.checkpoints > 0
        has_digests = travels and (self.settings.sync_check_interval > 0 or is_repeated)
        if route.weights.smoothing is not None and not is_repeated:
            route.weights.smoothing.begin_sync()
        if is_repeated or (has_digests and self._count == 0):
            with self.cost.timed("check_s"):
                route.check_base()
        self.needs_proof |= self._is_due(is_repeated)
        with self.cost.timed("sync_s"):
            self._count += 1
            last = self._sent
            self._sent = None  # what a sync that fails leaves behind is nobody's policy
            self.version = f"{self._run}-step{self.global_step()}-sync{self._count}"
            try:
                self._send(has_digests)
            except torch.OutOfMemoryError as error:
                if not route.group.is_together:
                    error.add_note(MEMORY_ADVICE)
                raise
            if torch.accelerator.is_available():
                # The engine has streams of its own, and seconds should include its copies.
                torch.accelerator.synchronize()
            with self.cost.timed("check_s"):
                self._remember(last, SentWeights(self.global_step(), fingerprint(route.model)))

    def _is_due(self, is_repeated: bool) -> bool:
        """Return whether the next rollout has to prove that this sync gave the engine a policy."""
        interval = self.settings.sync_check_interval
        if is_repeated:
            return True
        if interval == 0:
            return False
        # Digests would hide a race between a receiver's streams, and NCCL has not shown on a GPU
        # that there is none.
        is_nccl = self.route.group.is_together and self.route.checkpoints == 0
        return is_nccl or self._count % interval == 0

    def _send(self, has_digests: bool) -> None:
        route = self.route
        not_finite: list[str] = []  # tensors with NaN or infinity
        tensors = find_not_finite(route.tensors(), not_finite)
        # Of several processes with an engine, only those that write its files can compare them with
        # what it received.
        is_source = route.engine is not None and (route.folder is None or route.folder.is_writer)
        stream = MeteredStream(tensors, {} if has_digests and is_source else None)
        noise = None
        if route.group.is_together:
            noise = f"seed{self.settings.seed}-step{self.global_step()}"
        route.send(WeightUpdate(self.version, has_digests, noise=noise), stream)

        def verify() -> None:
            require_finite(not_finite)
            if stream.digests is not None and route.engine:
                self.cost.check_s += route.engine.compare_digests(stream.digests)
            self.require_version()

        route.group.run(verify)
        self.cost.quantize_s += stream.source_s
        self.cost.check_s += stream.digest_s
        self.cost.sent_bytes += stream.nbytes

    def _remember(self, last: SentWeights | None, now: SentWeights) -> None:
        is_unchanged = (
            last is not None
            and now.step >= last.step  # another training starts at 0 again
            # Without version counters: an optimizer with a learning rate of 0 counts one up, too.
            and now.fingerprint.values() == last.fingerprint.values()
        )
        if not is_unchanged:
            self.unchanged_since = now.step
        self._sent = now
        self.is_unused = True

    def unchanged_steps(self) -> range:
        """Return the steps before the last sync that changed no weight since an earlier sync."""
        last = self.unchanged_since if self._sent is None else self._sent.step
        return range(self.unchanged_since + 1, last + 1)

    def is_current(self) -> bool:
        """Return whether the policy is as it was sent. A collective operation.

        Right after a sync, which has just read the weights, what torch has counted since then is
        enough. Once tokens were sampled from them, they are read again: a fused optimizer leaves
        torch's counters as they are.
        """
        gathered: list[bool] = gather_object([self._is_as_sent()])
        return all(gathered)

    def _is_as_sent(self) -> bool:
        sent = self._sent
        if sent is None or sent.fingerprint.changes != counted_changes(self.route.model):
            return False
        if self.is_unused:
            return True
        with self.cost.timed("check_s"):
            return sent.fingerprint == fingerprint(self.route.model)

    def require_version(self) -> None:
        """Raise `SyncError` unless the engine holds what was sent, `ServerError` if it is new."""
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
