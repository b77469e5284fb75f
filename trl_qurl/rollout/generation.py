"""TRL's generation backend, fed with an 8-bit copy of the policy.

Three things differ from the parent: the engine starts from a quantized checkpoint, every sync sends quantized tensors,
and they enter vLLM through its own reload lifecycle, which takes checkpoint-format tensors as often as one likes. How
parameters are gathered (FSDP, ZeRO-3, PEFT) and how completions are generated is the parent's business.
"""

import functools
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, is_peft_model
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from trl_qurl.quantization.checkpoint import write_llmcompressor_checkpoint, write_streamed_checkpoint
from trl_qurl.quantization.layers import linear_layer_names, quantized_layer_names
from trl_qurl.quantization.weights import quantize_weights
from trl_qurl.rollout.directory import CheckpointDirectory
from trl_qurl.rollout.engines import ColocatedEngine, Engine, ServedEngine
from trl_qurl.rollout.probe import check_probe, probe_prompts
from trl_qurl.rollout.proof import DigestRecorder, SyncError, compare_digests
from trl_qurl.rollout.server import WORKER_EXTENSION, CheckpointVLLMClient
from trl_qurl.rollout.settings import RolloutSettings
from trl_qurl.rollout.substitution import substitute
from trl_qurl.rollout.weight_change import WeightChangeTracker


@dataclass
class RolloutCost:
    """Seconds and tokens on this process since the last look. `sync_s` contains `quantize_s`, and digests if any."""

    quantize_s: float = 0.0
    sync_s: float = 0.0
    check_s: float = 0.0
    generate_s: float = 0.0
    tokens: int = 0


class QuantizedVLLMGeneration(VLLMGeneration):
    """
    [`VLLMGeneration`] whose engine holds a quantized copy of the model.

    Args:
        rollout: Format and transport of the weights.
        args, kwargs: As for the parent.
    """

    def __init__(self, *args: Any, rollout: RolloutSettings, **kwargs: Any) -> None:
        self.rollout = rollout
        self.weight_version = "none"
        self.global_step: Callable[[], int] = lambda: 0
        self.engine: Engine | None = None
        self._run = uuid.uuid4().hex[:8]
        self._syncs = 0
        self.weight_metrics: dict[str, float] = {}
        self._cost = RolloutCost()
        self._tracker = WeightChangeTracker(rollout.weight_metrics_steps)
        super().__init__(*args, **kwargs)

    def pop_cost(self) -> RolloutCost:
        """What rollouts have cost since the last call."""
        cost, self._cost = self._cost, RolloutCost()
        return cost

    def pop_weight_metrics(self) -> dict[str, float]:
        """Weight metrics of the last sync, once."""
        metrics, self.weight_metrics = self.weight_metrics, {}
        return metrics

    # Engine start ----------------------------------------------------------------------------------------------------

    def _init_vllm(self) -> None:
        names = quantized_layer_names if self.rollout.scheme else linear_layer_names
        self._layers = names(self.model, self.rollout.ignore)
        if self._needs_directory():
            self._directory = self._shared_directory()
        if self.mode == "server":
            client = CheckpointVLLMClient if self.rollout.weight_sync == "checkpoint" else vllm_generation.VLLMClient
            with substitute(vllm_generation, "VLLMClient", client):
                super()._init_vllm()
            if client is CheckpointVLLMClient and self.accelerator.is_main_process:
                self.vllm_client.check_ready(self.rollout.scheme, self.rollout.ignore)
                self.engine = ServedEngine(self.vllm_client)
            return
        start = None
        if self._starts_from_checkpoint():
            start = self._write_checkpoint("start", self._iter_named_params())
        build_engine = functools.partial(_build_engine, vllm_generation.LLM, start, self.rollout.engine_kwargs)
        with substitute(vllm_generation, "LLM", build_engine):
            super()._init_vllm()
        self.engine = ColocatedEngine(self.llm)
        if start is not None and self.accelerator.is_main_process:
            # The weights are in the engine now, and tmpfs is memory.
            for weights in start.glob("*.safetensors"):
                weights.unlink()

    def _starts_from_checkpoint(self) -> bool:
        return self.rollout.scheme is not None or not self.model.name_or_path

    def _needs_directory(self) -> bool:
        return self.rollout.weight_sync == "checkpoint" or (self.mode == "colocate" and self._starts_from_checkpoint())

    def _shared_directory(self) -> Path:
        """The directory of this run's checkpoints, the same on every process; the main process owns it."""
        shared: list[Any] = [None]
        if self.accelerator.is_main_process:
            # Two generations at most: the one being written and the one the engine may still be reading.
            generations = 2 if self.rollout.weight_sync == "checkpoint" else 1
            self._owned = CheckpointDirectory(self.rollout.checkpoint_dir, generations * self._checkpoint_bytes())
            shared = [self._owned.path]
        broadcast_object_list(shared, from_process=0)
        return shared[0]

    def _checkpoint_bytes(self) -> int:
        names = {f"{layer}.weight" for layer in self._layers} if self.rollout.scheme else ()
        return sum(
            parameter.numel() * (1 if name in names else parameter.element_size())
            for name, parameter in self._base_model().named_parameters()
        )

    def _base_model(self) -> Any:
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    # Weight sync -----------------------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """
        Bring the engine to the policy's current weights, quantized, and make sure that it got there.

        A collective operation: every process takes part in gathering the parameters.

        Raises:
            SyncError: The engine does not hold what was sent; see `proof`.
            RuntimeError: The engine could not load the weights.
        """
        started = time.perf_counter()
        self._tracker.begin_sync()
        every = self.rollout.sync_check_steps
        checked = every > 0 and self._syncs % every == 0
        self._syncs += 1
        self.weight_version = f"{self._run}-step{self.global_step()}-sync{self._syncs}"
        if self.mode == "server" and self.rollout.weight_sync == "stream":
            super().sync_weights()
        else:
            self._load(digest=checked)
        self.weight_metrics = self._tracker.end_sync()
        self._cost.sync_s += time.perf_counter() - started
        if checked and self.rollout.sync_probe:
            self._check_probe()

    def _load(self, digest: bool) -> None:
        """Send the weights through the engine's loader, then compare what it says about them with what was sent."""
        self._wake_up_weights()
        sent = DigestRecorder(self._iter_named_params(), enabled=digest)
        source: DigestRecorder | Path = sent
        if self.rollout.weight_sync == "checkpoint":
            source = self._write_checkpoint(f"sync-{self._syncs}", sent)
        if self.engine is not None:
            reports = self.engine.load(source, self.weight_version, digest)
            for report in reports:
                if report.version != self.weight_version:
                    raise SyncError(f"The engine loaded {report.version!r} when {self.weight_version!r} was sent.")
                if digest:
                    compare_digests(sent.digests, report.digests)
            if source is sent and not sent.exhausted:
                raise SyncError("The engine stopped reading before the last tensor: its model is half updated.")
            self._require_version()
        if self.rollout.weight_sync == "checkpoint":
            self.accelerator.wait_for_everyone()  # nobody reads the old directory any more
            if self.accelerator.is_main_process:
                shutil.rmtree(self._directory / f"sync-{self._syncs - 1}", ignore_errors=True)

    def _require_version(self) -> None:
        held = self.engine.version() if self.engine is not None else self.weight_version
        if held != self.weight_version:
            raise SyncError(
                f"The engine holds the weights {held!r}, not {self.weight_version!r} which this run sent last: it was "
                "restarted, or another run uses it. Give every run a server of its own, and resume from the last "
                "checkpoint."
            )

    def _check_probe(self) -> None:
        """Compare the engine with the trainer's own quantized forward pass, where the trainer has whole weights."""
        started = time.perf_counter()
        if self.engine is not None and not self._dist.is_fsdp and not self._dist.is_zero3:
            vocabulary_size = self._base_model().config.get_text_config().vocab_size
            prompts = probe_prompts(vocabulary_size, longest=self.max_model_length and self.max_model_length - 1)
            scored = self.engine.next_token_logps(prompts)
            check_probe(self.model, prompts, scored, self._layers, self.rollout.scheme)
        self._cost.check_s += time.perf_counter() - started

    def _wake_up_weights(self) -> None:
        # As the parent does: loading into unmapped memory crashes on some devices.
        if self.enable_sleep_mode:
            vllm_generation.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False

    def _write_checkpoint(self, name: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> Path:
        """Write tensors as a checkpoint on the main process; all processes take part in gathering them."""
        path = self._directory / name
        scheme = self.rollout.scheme
        write: Callable[..., Any] = write_streamed_checkpoint
        if scheme is not None and self.rollout.quantizer == "llmcompressor":
            write = write_llmcompressor_checkpoint
            # llm-compressor rounds for itself; our stream beside it is what its result is measured and checked by.
            for _ in tensors:
                pass
            tensors = super()._iter_named_params()
        if self.accelerator.is_main_process:
            write(tensors, self._base_model(), self.processing_class, scheme, self.rollout.ignore, path)
        else:
            for _ in tensors:
                pass
        self.accelerator.wait_for_everyone()
        return path

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parent's parameters, quantized: what every transport sends."""
        if self.rollout.scheme is None:
            tensors = self._iter_observed_params()
        else:
            tensors = super()._iter_named_params()
            tensors = quantize_weights(tensors, self.rollout.scheme, self._layers, self._tracker.observe)
        if is_peft_model(self.model):
            # vLLM may hold a tensor until its layer is complete; by then the adapter is unmerged from the parameter.
            tensors = ((name, tensor.clone()) for name, tensor in tensors)
        return self._timed(tensors)

    def _iter_observed_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full-precision parameters, shown to the tracker."""
        for name, tensor in super()._iter_named_params():
            layer = name.removesuffix(".weight")
            if layer in self._layers and layer != name:
                self._tracker.observe(layer, tensor, None, None)
            yield name, tensor

    def _timed(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        iterator = iter(tensors)
        while True:
            started = time.perf_counter()
            item = next(iterator, None)
            self._cost.quantize_s += time.perf_counter() - started
            if item is None:
                return
            yield item

    # Generation ------------------------------------------------------------------------------------------------------

    def generate(self, *args: Any, **kwargs: Any) -> tuple:
        """The parent's generation, from the weights of this run's last sync, with its seconds and tokens counted."""
        if self.mode == "server":
            self._require_version()
        sync_before = self._cost.sync_s
        started = time.perf_counter()
        output = super().generate(*args, **kwargs)
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
