"""TRL's generation backend, fed with an 8-bit copy of the policy.

Three things differ from the parent: the engine starts from a quantized checkpoint, every sync sends quantized tensors,
and they enter vLLM through its own reload lifecycle, which takes checkpoint-format tensors as often as one likes. How
parameters are gathered (FSDP, ZeRO-3, PEFT) and how completions are generated is the parent's business.
"""

import functools
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, is_peft_model
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from trl_qurl.quantization.checkpoint import write_llmcompressor_checkpoint, write_streamed_checkpoint
from trl_qurl.quantization.layers import linear_layer_names, quantized_layer_names
from trl_qurl.quantization.schemes import QuantizationScheme
from trl_qurl.quantization.storage import working_directory
from trl_qurl.quantization.weights import quantize_weight, quantize_weights
from trl_qurl.rollout.server import WORKER_EXTENSION, CheckpointVLLMClient
from trl_qurl.rollout.substitution import substitute
from trl_qurl.rollout.weight_change import WeightChangeTracker


@dataclass(frozen=True)
class RolloutSettings:
    """
    What the trainer's config says about rollouts.

    Attributes:
        scheme: Format of the rollout weights; `None` for full precision.
        ignore: Modules kept in full precision.
        quantizer: `"streaming"` or `"llmcompressor"`.
        weight_sync: `"stream"` or `"checkpoint"`.
        checkpoint_dir: Where checkpoints for the engine are written; `None` to choose.
        engine_kwargs: Further arguments of the colocated engine.
        weight_metrics_steps: Rollouts between measurements of the weights; 0 for none.
    """

    scheme: QuantizationScheme | None
    ignore: tuple[str, ...] = ("lm_head",)
    quantizer: str = "streaming"
    weight_sync: str = "stream"
    checkpoint_dir: str | None = None
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    weight_metrics_steps: int = 16


@dataclass
class RolloutCost:
    """Seconds and tokens on this process since the last look. `sync_s` contains `quantize_s`."""

    quantize_s: float = 0.0
    sync_s: float = 0.0
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
        self.weight_version = 0
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
            return
        start = self._write_checkpoint("start") if self._starts_from_checkpoint() else None
        build_engine = functools.partial(_build_engine, vllm_generation.LLM, start, self.rollout.engine_kwargs)
        with substitute(vllm_generation, "LLM", build_engine):
            super()._init_vllm()
        if start is not None and self.accelerator.is_main_process:
            # The weights are in the engine now, and tmpfs is memory.
            for weights in start.glob("*.safetensors"):
                weights.unlink()

    def _starts_from_checkpoint(self) -> bool:
        return self.rollout.scheme is not None or not self.model.name_or_path

    def _needs_directory(self) -> bool:
        return self.rollout.weight_sync == "checkpoint" or (self.mode == "colocate" and self._starts_from_checkpoint())

    def _shared_directory(self) -> Path:
        """A directory for this run's checkpoints, the same on every process, gone when the main process ends."""
        paths: list[Path] = []
        if self.accelerator.is_main_process:
            # Two generations at most: the one being written and the one the engine may still be reading.
            generations = 2 if self.rollout.weight_sync == "checkpoint" else 1
            paths = [working_directory(self.rollout.checkpoint_dir, generations * self._checkpoint_bytes())]
            weakref.finalize(self, shutil.rmtree, paths[0], ignore_errors=True)
        shared: list[Any] = paths or [None]
        broadcast_object_list(shared, from_process=0)
        return shared[0]

    def _checkpoint_bytes(self) -> int:
        names = {f"{layer}.weight" for layer in self._layers} if self.rollout.scheme else ()
        return sum(
            parameter.numel() * (1 if name in names else parameter.element_size())
            for name, parameter in self._base_model().named_parameters()
        )

    def _base_model(self) -> torch.nn.Module:
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    # Weight sync -----------------------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """
        Bring the engine to the policy's current weights, quantized.

        A collective operation: every process takes part in gathering the parameters.

        Raises:
            RuntimeError: If the engine did not read every tensor.
        """
        started = time.perf_counter()
        self._tracker.begin_sync()
        if self.rollout.weight_sync == "checkpoint":
            self._sync_by_checkpoint()
        elif self.mode == "server":
            super().sync_weights()
        else:
            self._sync_in_process()
        self.weight_version += 1
        self.weight_metrics = self._tracker.end_sync()
        self._cost.sync_s += time.perf_counter() - started

    def _sync_in_process(self) -> None:
        self._wake_up_weights()
        tensors = _Exhaustible(self._iter_named_params())
        self.llm.collective_rpc("load_rollout_weights", kwargs={"weights_iterator": tensors})
        if not tensors.exhausted:
            raise RuntimeError(
                "vLLM stopped reading the new weights before the last tensor, so its model is half updated: this vLLM "
                "version reloads weights in a way that trl-qurl does not know; see tests/test_trl_contract.py."
            )
        self.llm.reset_prefix_cache()

    def _sync_by_checkpoint(self) -> None:
        path = self._write_checkpoint(f"version-{self.weight_version + 1}")
        if self.mode == "colocate":
            self._wake_up_weights()
            self.llm.collective_rpc("load_rollout_weights", kwargs={"weights_path": str(path)})
            self.llm.reset_prefix_cache()
            self.accelerator.wait_for_everyone()  # nobody reads the old directory any more
        elif self.accelerator.is_main_process:
            self.vllm_client.reload_weights(str(path))
        if self.accelerator.is_main_process:
            shutil.rmtree(self._directory / f"version-{self.weight_version}", ignore_errors=True)

    def _wake_up_weights(self) -> None:
        # As the parent does: loading into unmapped memory crashes on some devices.
        if self.enable_sleep_mode:
            vllm_generation.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False

    def _write_checkpoint(self, name: str) -> Path:
        """Write the current weights as a checkpoint on the main process; all processes take part in gathering."""
        path = self._directory / name
        scheme = self.rollout.scheme
        write: Callable[..., Any] = write_streamed_checkpoint
        tensors = self._iter_named_params()
        if scheme is not None and self.rollout.quantizer == "llmcompressor":
            write = write_llmcompressor_checkpoint
            tensors = self._iter_observed_params(scheme)
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
            tensors = self._iter_observed_params(None)
        else:
            tensors = super()._iter_named_params()
            tensors = quantize_weights(tensors, self.rollout.scheme, self._layers, self._tracker.observe)
        if is_peft_model(self.model):
            # vLLM may hold a tensor until its layer is complete; by then the adapter is unmerged from the parameter.
            tensors = ((name, tensor.clone()) for name, tensor in tensors)
        return self._timed(tensors)

    def _iter_observed_params(self, scheme: QuantizationScheme | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Full-precision parameters; the tracker is shown the codes that llm-compressor will round them to, if any."""
        for name, tensor in super()._iter_named_params():
            layer = name.removesuffix(".weight")
            if self._tracker.observes and layer in self._layers and layer != name:
                self._tracker.observe(layer, tensor, *(quantize_weight(tensor, scheme) if scheme else (None, None)))
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
        """The parent's generation, with its seconds and tokens counted."""
        sync_before = self._cost.sync_s
        started = time.perf_counter()
        output = super().generate(*args, **kwargs)
        # With sleep mode the parent syncs in here.
        self._cost.generate_s += time.perf_counter() - started - (self._cost.sync_s - sync_before)
        self._cost.tokens += sum(len(completion) for completion in output[1])
        return output


class _Exhaustible:
    """An iterator that remembers whether its reader reached the end."""

    def __init__(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._iterator = iterator
        self.exhausted = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._iterator
        self.exhausted = True


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
