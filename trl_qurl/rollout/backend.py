"""TRL's generation backend, fed with an 8-bit copy of the policy.

Three things differ from the parent: the engine starts from a quantized checkpoint, every sync sends quantized tensors,
and they enter vLLM through its own reload lifecycle, which takes checkpoint-format tensors as often as one likes. How
parameters are gathered (FSDP, ZeRO-3, PEFT) and how completions are generated is the parent's business.
"""

import functools
import logging
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object, is_peft_model
from torch.distributed.fsdp import FSDPModule
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from trl_qurl.quantization.checkpoint import write_llmcompressor_checkpoint, write_streamed_checkpoint
from trl_qurl.quantization.layers import linear_layer_names, quantized_layer_names
from trl_qurl.quantization.stream import quantize_weights, stored_tensors
from trl_qurl.quantization.uaq import recorded_scale
from trl_qurl.rollout.checks.digests import DigestRecorder, compare_digests
from trl_qurl.rollout.checks.probe import STEPS, check_probe, probe_prompts
from trl_qurl.rollout.cost import RolloutCost
from trl_qurl.rollout.directory import CheckpointDirectory
from trl_qurl.rollout.engine.attention import check_head_size
from trl_qurl.rollout.engine.client import WORKER_EXTENSION, RolloutVLLMClient
from trl_qurl.rollout.engine.engines import ColocatedEngine, Engine, ServedEngine
from trl_qurl.rollout.errors import SyncError
from trl_qurl.rollout.settings import RolloutSettings
from trl_qurl.rollout.stream import TensorMetadata, announce, timed
from trl_qurl.rollout.substitution import substitute
from trl_qurl.rollout.unchanged import frozen_parameters
from trl_qurl.rollout.weight_change import WeightChangeTracker

logger = logging.getLogger(__name__)


class QuantizedVLLMGeneration(VLLMGeneration):
    """
    [`VLLMGeneration`] whose engine holds a quantized copy of the model.

    Args:
        rollout: Format and transport of the weights.
        args, kwargs: As for the parent.
    """

    _weight_metadata: dict[str, TensorMetadata] | None

    def __init__(self, *args: Any, rollout: RolloutSettings, **kwargs: Any) -> None:
        self.rollout = rollout
        self.weight_version = "none"
        self.global_step: Callable[[], int] = lambda: 0
        self.engine: Engine | None = None
        self._run = uuid.uuid4().hex[:8]
        self._syncs = 0
        self._frozen: frozenset[str] = frozenset()  # at the last sync
        self._frozen_at_scale = 1.0
        self._left_out: frozenset[str] = frozenset()
        self._sent_dtype: torch.dtype | None = None
        self._weight_metrics: dict[str, float] = {}
        self._cost = RolloutCost()
        self._tracker = WeightChangeTracker(rollout.weight_metrics_interval, rollout.scheme)
        super().__init__(*args, **kwargs)

    def pop_cost(self) -> RolloutCost:
        """What rollouts have cost since the last call."""
        cost, self._cost = self._cost, RolloutCost()
        return cost

    def pop_weight_metrics(self) -> dict[str, float]:
        """Weight metrics of the last sync, once."""
        metrics, self._weight_metrics = self._weight_metrics, {}
        return metrics

    # Engine start ----------------------------------------------------------------------------------------------------

    def _init_vllm(self) -> None:
        scheme, ignore = self.rollout.scheme, self.rollout.ignore
        self._layers = (
            quantized_layer_names(self.model, ignore, scheme) if scheme else linear_layer_names(self.model, ignore)
        )
        if self.mode == "server":
            self._connect()
        else:
            self._start_colocated()

    def _connect(self) -> None:
        """Let the main process connect to the server; every process learns how weights will travel."""
        rollout = self.rollout
        client = functools.partial(
            RolloutVLLMClient,
            scheme=rollout.scheme,
            ignore=rollout.ignore,
            weight_sync="checkpoint" if rollout.weight_sync == "llmcompressor" else rollout.weight_sync,
            request_timeout=rollout.request_timeout,
        )
        with substitute(vllm_generation, "VLLMClient", client):
            super()._init_vllm()
        way: list[Any] = [None, None]
        if self.accelerator.is_main_process:
            self.engine = ServedEngine(self.vllm_client)
            way = [self.vllm_client.transport, self.engine.describe().dtype]
        broadcast_object_list(way, from_process=0)
        self._transport, dtype = way
        # Casting for the engine saves bytes on the way. llm-compressor writes each tensor in the policy's own dtype,
        # so the stream that its checkpoint is checked by must not be cast either.
        if dtype and self.rollout.weight_sync != "llmcompressor":
            self._sent_dtype = getattr(torch, dtype)
        if self._transport == "checkpoint":
            self._directory = self._shared_directory()

    def _start_colocated(self) -> None:
        """Start an engine in this process, on a checkpoint that says how its layers are quantized."""
        check_head_size(self.model.config)
        self._transport = "stream" if self.rollout.weight_sync == "stream" else "checkpoint"
        start = None
        if self._transport == "checkpoint" or self._starts_from_checkpoint():
            self._directory = self._shared_directory()
        if self._starts_from_checkpoint():
            self._say("Writing %s weights for vLLM to %s.", self._format, self._directory)
            start = self._write_checkpoint("start", self._iter_named_params())
        build_engine = functools.partial(_build_engine, vllm_generation.LLM, start, self.rollout.engine_kwargs)
        self._say("Starting vLLM (%s); if it compiles, that takes a minute.", self._format)
        with substitute(vllm_generation, "LLM", build_engine):
            super()._init_vllm()
        self._say("vLLM is ready.")
        self.engine = ColocatedEngine(self.llm)
        if start is not None and self._is_writer:
            # The weights are in the engine now, and tmpfs is memory.
            for weights in start.glob("*.safetensors"):
                weights.unlink()

    def _say(self, message: str, *values: object) -> None:
        """Tell the user, once for all processes, what is going to take its time."""
        if self.accelerator.is_main_process:
            logger.info(message, *values)

    @property
    def _format(self) -> str:
        return self.rollout.scheme.label if self.rollout.scheme else "full-precision"

    def _starts_from_checkpoint(self) -> bool:
        return self.rollout.scheme is not None or not self.model.name_or_path

    @property
    def _is_writer(self) -> bool:
        """Whether this process writes checkpoints: one process for a server, one on each node for its own engines."""
        accelerator = self.accelerator
        return accelerator.is_main_process if self.mode == "server" else accelerator.is_local_main_process

    def _shared_directory(self) -> Path:
        """The directory of the checkpoints that this process's engine loads; whoever writes them owns it."""
        owned: Path | None = None
        if self._is_writer:
            # Two generations at most: the one being written and the one the engine may still be reading.
            generations = 2 if self._transport == "checkpoint" else 1
            self._owned = CheckpointDirectory(self.rollout.checkpoint_dir, generations * self._checkpoint_bytes())
            owned = self._owned.path
        first_of_node = self.accelerator.process_index - self.accelerator.local_process_index
        writer = 0 if self.mode == "server" else first_of_node
        return gather_object([owned])[writer]

    def _checkpoint_bytes(self) -> int:
        return sum(
            stored.nbytes
            for name, parameter in self.base_model.named_parameters()
            for stored in stored_tensors(name, parameter, self.rollout.scheme, self._layers)
        )

    @property
    def base_model(self) -> Any:
        """The policy without what PEFT puts around it."""
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    # Weight sync -----------------------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """
        Bring the engine to the policy's current weights, quantized, and make sure that it got there.

        A collective operation: every process takes part in gathering the parameters.

        Raises:
            SyncError: The engine does not hold what was sent; see `proof`.
            RuntimeError: The engine could not load the weights (`ServerError` from a server).
        """
        started = time.perf_counter()
        self._tracker.begin_sync()
        every = self.rollout.sync_check_interval
        checked = every > 0 and self._syncs % every == 0
        self._left_out = self._unchanged(checked)
        self._syncs += 1
        self.weight_version = f"{self._run}-step{self.global_step()}-sync{self._syncs}"
        self._load(digest=checked)
        self._weight_metrics = self._tracker.end_sync()
        self._cost.sync_s += time.perf_counter() - started
        if checked and self.rollout.sync_probe:
            self._check_probe()

    def _unchanged(self, checked: bool) -> frozenset[str]:
        """
        What this sync leaves out: parameters that were frozen at the last one already, and still are.

        A sync that is checked or measured sends everything, so that whatever changes a frozen parameter after all is
        in the engine by then.
        """
        # UAQ scales norms whether they are trained or not.
        scale = recorded_scale(self.base_model)
        before = self._frozen if scale == self._frozen_at_scale else frozenset()
        self._frozen_at_scale = scale
        self._frozen = frozen_parameters(self.model) if self._dist.fsdp_version != 1 else frozenset()
        sleeps = self.mode == "colocate" and self.enable_sleep_mode  # an engine that slept holds nothing
        if checked or sleeps or self._tracker.observes or self.rollout.weight_sync == "llmcompressor":
            return frozenset()
        return before & self._frozen

    def _load(self, digest: bool) -> None:
        """Send the weights through the engine's loader, then compare what it says about them with what was sent."""
        self._wake_up_weights()
        metadata = self._announce() if self.mode == "server" and self._transport == "stream" else None
        # In process every engine gets its own stream; otherwise what the writer sends is what all engines load.
        knows = self._is_writer or (self.mode == "colocate" and self._transport == "stream")
        sent = DigestRecorder(self._iter_named_params(), enabled=digest and knows)
        source: DigestRecorder | Path = sent
        if self._transport == "checkpoint":
            source = self._write_checkpoint(f"sync-{self._syncs}", sent)
        if self.engine is not None:
            reports = self.engine.load(source, self.weight_version, digest, metadata, partial=bool(self._left_out))
            for report in reports:
                if report.version != self.weight_version:
                    raise SyncError(
                        f"The engine loaded the weights {report.version!r} when {self.weight_version!r} was sent: "
                        "resume from the last checkpoint."
                    )
                if digest and knows:
                    compare_digests(sent.digests, report.digests)
            if source is sent and not sent.exhausted:
                raise SyncError(
                    "The engine stopped reading before the last tensor, so its model is half updated: resume "
                    "from the last checkpoint."
                )
            self._require_version()
        elif source is sent:
            for _ in sent:  # gathering a parameter takes every process
                pass
        self._cost.check_s += sent.seconds
        if self._transport == "checkpoint":
            self.accelerator.wait_for_everyone()  # nobody reads the old directory any more
            if self._is_writer:
                shutil.rmtree(self._directory / f"sync-{self._syncs - 1}", ignore_errors=True)

    def _announce(self) -> TensorMetadata:
        """What the stream will hold, for a server that must know it beforehand; the parameters are walked once."""
        if self._weight_metadata is None:
            self._weight_metadata = announce(
                self.policy_parameters(), self.rollout.scheme, self._layers, self._sent_dtype
            )
        announced = self._weight_metadata.items()
        return [entry for name, entries in announced if name not in self._left_out for entry in entries]

    def _require_version(self) -> None:
        held = self.engine.version() if self.engine is not None else self.weight_version
        if held != self.weight_version:
            raise SyncError(
                f"The engine holds the weights {held!r}, not {self.weight_version!r} which this run sent last: it was "
                "restarted, or another run uses it. Give every run a server of its own, and resume from the last "
                "checkpoint."
            )

    def _check_probe(self) -> None:
        """Compare the engine with the trainer's own quantized forward pass, where the trainer can make one."""
        started = time.perf_counter()
        sharded = self._dist.is_fsdp or self._dist.is_zero3
        if self._dist.is_zero3 or self._dist.fsdp_version == 1:
            return  # a layer's weight is not whole where the pass would quantize it
        probe: list[Any] = [None]  # prompts, and what the engine makes of them
        if self.engine is not None:
            if self.mode == "colocate" and self.enable_sleep_mode:
                self.llm.wake_up(tags=["kv_cache"])  # as the parent will, before it generates
            engine = self.engine.describe()
            vocabulary_size = self.base_model.config.get_text_config().vocab_size
            prompts = probe_prompts(vocabulary_size, engine.block_size, engine.max_model_len)
            probe = [(prompts, self.engine.continue_greedily(prompts, STEPS))]
        if self.mode == "server" and sharded:
            broadcast_object_list(probe, from_process=0)  # each process holds a part of the weights
        if probe[0] is not None:
            prompts, continuations = probe[0]
            check_probe(self.model, prompts, continuations, self._layers, self.rollout.scheme)
        self._cost.check_s += time.perf_counter() - started

    def _wake_up_weights(self) -> None:
        # As the parent does: loading into unmapped memory crashes on some devices.
        if self.mode == "colocate" and self.enable_sleep_mode:
            vllm_generation.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False

    def _write_checkpoint(self, name: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> Path:
        """Write tensors as a checkpoint where this process is to; all processes take part in gathering them."""
        path = self._directory / name
        scheme = self.rollout.scheme
        write: Callable[..., Any] = write_streamed_checkpoint
        if scheme is not None and self.rollout.weight_sync == "llmcompressor":
            write = write_llmcompressor_checkpoint
            # llm-compressor rounds for itself; our stream beside it is what its result is measured and checked by.
            for _ in tensors:
                pass
            tensors = self.policy_parameters()
        if self._is_writer:
            write(tensors, self.base_model, self.processing_class, scheme, self.rollout.ignore, path)
        else:
            for _ in tensors:
                pass
        self.accelerator.wait_for_everyone()
        return path

    def policy_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """
        The policy's parameters under their checkpoint names, each whole while it is looked at, adapters merged in.

        A collective operation: every process goes through all of them, to the end, where adapters come out again.
        """
        if self._dist.fsdp_version == 2:
            # A pass without a backward leaves the outermost parameters whole, where the parent expects parts.
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return super()._iter_named_params()

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parent's parameters, quantized: what every transport sends."""
        layers = {layer for layer in self._layers if f"{layer}.weight" not in self._left_out}
        parameters = ((name, tensor) for name, tensor in self.policy_parameters() if name not in self._left_out)
        tensors = quantize_weights(parameters, self.rollout.scheme, layers, self._tracker.observe, self._sent_dtype)
        if is_peft_model(self.model):
            # vLLM may hold a tensor until its layer is complete; by then the adapter is unmerged from the parameter.
            tensors = ((name, tensor.clone()) for name, tensor in tensors)
        return timed(tensors, self._cost.add_tensor)

    # Generation ------------------------------------------------------------------------------------------------------

    def generate(self, *args: Any, **kwargs: Any) -> tuple:
        """The parent's generation, from the weights of this run's last sync, with its seconds and tokens counted."""
        self._require_version()
        sync_before = self._cost.sync_s
        started = time.perf_counter()
        output = super().generate(*args, **kwargs)
        self._require_version()  # a server that restarted meanwhile answers from other weights
        # With sleep mode the parent syncs in here.
        self._cost.generate_s += time.perf_counter() - started - (self._cost.sync_s - sync_before)
        self._cost.tokens += sum(len(completion) for completion in output[1])
        return output


def _build_engine(engine: type, start: Path | None, engine_kwargs: dict[str, Any], **trl_kwargs: Any) -> Any:
    """vLLM's `LLM` with TRL's arguments, our starting checkpoint as the model, and the user's extras."""
    if start is not None:
        trl_kwargs["model"] = str(start)
    return engine(**trl_kwargs, **engine_kwargs, worker_extension_cls=WORKER_EXTENSION)


@contextmanager
def quantized_generation(module: Any, rollout: RolloutSettings) -> Iterator[None]:
    """Let the TRL trainer in `module` build a `QuantizedVLLMGeneration` inside the block."""
    with substitute(module, "VLLMGeneration", functools.partial(QuantizedVLLMGeneration, rollout=rollout)):
        yield
