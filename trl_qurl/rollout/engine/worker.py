"""The vLLM worker extension that loads new weights into the layers.

vLLM imports this class by name (`--worker-extension-cls`, its official way to add worker methods). Neither the class
nor its imports need TRL, so the engine may run in an environment without it. On CUDA, vLLM's own reload does the work.
On CPU, `cpu` adds fixes to it.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub import snapshot_download
from vllm.config import VllmConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.platforms import current_platform

from trl_qurl.quantization.storage import read_tensors, tensor_shapes
from trl_qurl.quantization.stream import NamedTensors
from trl_qurl.rollout.checks.tensors import ReceivedTensors, base_digests, compare_digests, tensor_digest
from trl_qurl.rollout.engine.interface import FRESH, NOT_RECEIVED, REFUSED, Digests, WeightUpdate
from trl_qurl.rollout.errors import SyncError

if current_platform.is_cpu():
    from trl_qurl.rollout.engine import cpu


class RolloutWorker:
    """Methods that vLLM mixes into its worker class. Most of these attributes are that class's own."""

    reload_weights: Callable[..., None]
    get_model: Callable[[], torch.nn.Module]
    model_runner: Any
    vllm_config: VllmConfig
    weight_transfer_engine: Any
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, list]], None]
    finish_weight_update: Callable[[], None]
    rollout_digests: Digests  # of the latest load
    loaded_version = FRESH

    def load_rollout_weights(
        self,
        update: Mapping[str, Any],  # the fields of a `WeightUpdate`
        weights_iterator: NamedTensors | None = None,  # only in the trainer's process
        weights_path: str | None = None,  # a checkpoint on a file system that this worker sees
        metadata: dict[str, list] | None = None,  # `names`, `dtype_names`, `shapes` of a transfer by vLLM itself
    ) -> Digests:
        """Replace weights in place with checkpoint-format tensors from one of three sources.

        Raises `RuntimeError` if a layer kept its old weights or does not hold the new ones, if the weights belong to
        another model, or if an earlier load failed.
        """
        request = WeightUpdate(**update)
        self._refuse_other_model(weights_path, metadata)
        if getattr(self, "rollout_load_failed", False):
            raise RuntimeError("An earlier load of weights failed halfway: restart the server.")
        self.rollout_load_failed = True
        received = ReceivedTensors(self.get_model(), enabled=request.digest)
        self.rollout_digests = received.digests
        with _watched_reload(_computed_values(self.get_model())):
            if metadata is not None:
                self._receive(metadata, received)
            elif weights_path is not None:
                self._reload(received.watch(read_tensors(Path(weights_path))))
            else:
                self._reload(received.watch(weights_iterator or ()))
            self.rollout_load_failed = False  # vLLM can reload even if a layer is incomplete
        received.compare()
        self.loaded_version = request.version
        return received.digests

    def compare_rollout_digests(self, sent: Digests) -> None:
        """Raise `SyncError` if the latest load, with digests, received anything but the weights that were sent."""
        compare_digests(sent, self.rollout_digests)

    def accept_rollout_adapter(self, update: Mapping[str, Any], path: str) -> Digests:
        """Record the version of an adapter that vLLM has just loaded from a directory.

        Returns the digests of the files. Raises `SyncError` if the engine holds another adapter.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        dtype = self.vllm_config.lora_config.lora_dtype
        tensors = dict(read_tensors(Path(path)))
        digests = sorted(tensor_digest(tensor.to(dtype)) for tensor in tensors.values())
        if digests not in [_loaded_digests(adapter) for adapter in manager.list_adapters().values()]:
            reason = f"it uses a different adapter than the one in {path}"
            raise SyncError(f"{NOT_RECEIVED}: {reason}. Resume from the last checkpoint.")
        self.rollout_digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
        self.loaded_version = WeightUpdate(**update).version
        return self.rollout_digests

    def digest_rollout_base(self) -> Digests:
        """Return digests of the checkpoint that the engine started from, in the engine's dtype."""
        config = self.vllm_config.model_config
        path = config.model
        if not Path(path).is_dir():
            path = snapshot_download(path, local_files_only=True, allow_patterns="*.safetensors")
        return base_digests(read_tensors(Path(path)), config.dtype)

    def rollout_version(self) -> str:
        """Return the version of the weights loaded last. Only newer versions of vLLM record one themselves."""
        return self.loaded_version

    def _reload(self, named_tensors: NamedTensors) -> None:
        if not current_platform.is_cpu():
            self.reload_weights(weights_iterator=named_tensors)
            return
        model = self.get_model()
        cpu.use_reloadable_int8_kernels(model)
        cpu.drop_expert_kernels(model)
        self.reload_weights(weights_iterator=named_tensors)
        cpu.repack_output_head(model)

    def _receive(self, metadata: dict[str, list], received: ReceivedTensors) -> None:
        """Receive one update through vLLM's weight transfer."""
        self.start_weight_update()
        engine, model = self.weight_transfer_engine, self.weight_transfer_engine.model
        # The transfer engine uses only this method of a model.
        watched = SimpleNamespace(load_weights=lambda weights: model.load_weights(received.watch(weights)))
        engine.set_weight_update_target(watched, engine.model_config)
        self.update_weights(metadata)
        engine.reset_weight_update_target()
        self.finish_weight_update()

    def _refuse_other_model(self, weights_path: str | None, metadata: dict[str, list] | None) -> None:
        """Raise `RuntimeError` for weights of another model, before any layer changes.

        Compares names and shapes with the checkpoint that the server started from, but only if that is quantized: in a
        model's own checkpoint, tensor names may differ from parameter names.
        """
        start = Path(self.vllm_config.model_config.model)
        if self.vllm_config.quant_config is None or not any(start.glob("*.safetensors")):
            return
        if metadata is not None:
            sent_shapes = dict(zip(metadata["names"], metadata["shapes"], strict=True))
        elif weights_path is not None:
            sent_shapes = tensor_shapes(Path(weights_path))
        else:
            return  # a colocated engine, started from the trainer's own model
        server_shapes = tensor_shapes(start)
        names = sent_shapes.keys() | server_shapes.keys()
        differing = sorted(name for name in names if sent_shapes.get(name) != server_shapes.get(name))
        if differing:
            name = differing[0]
            raise RuntimeError(
                f"These weights belong to a different model than the server's: {len(differing)} tensors differ, first "
                f"{name} (shape {sent_shapes.get(name)} instead of {server_shapes.get(name)}). {REFUSED}"
            )

    def describe_rollouts(self) -> dict[str, object]:
        """Return the fields of an `EngineDescription`; `format` is the method's name if not compressed-tensors."""
        quantization = self.vllm_config.quant_config
        form, ignore = quantization and quantization.get_name(), []
        if isinstance(quantization, CompressedTensorsConfig):
            groups = [group["weights"] for group in quantization.target_scheme_map.values()]
            bits = max((weights.num_bits for weights in groups if weights), default=16)
            blocks = " in blocks" if quantization.has_blocked_weights() else ""
            form, ignore = f"{bits}-bit {quantization.quant_format}{blocks}", list(quantization.ignore)
        dtypes = {
            parameter.dtype
            for layer in self.get_model().modules()
            if getattr(layer, "scheme", None) is None  # vLLM's quantized layers have one
            for name, parameter in layer.named_parameters(recurse=False)
            if name == "weight" and parameter.is_floating_point()  # scales of a cache are float32
        }
        return {
            "format": form,
            "ignore": ignore,
            "block_size": self.vllm_config.cache_config.block_size,
            "max_model_len": self.vllm_config.model_config.max_model_len,
            "kv_cache_dtype": self.vllm_config.cache_config.cache_dtype,
            "max_lora_rank": lora.max_lora_rank if (lora := self.vllm_config.lora_config) else 0,
            "dtype": str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else None,
        }


def _loaded_digests(adapter: Any) -> list[str]:
    """Return digests of a loaded adapter's matrices. vLLM packs the matrices of fused layers together."""
    parts = [part for layer in adapter.loras.values() for part in (layer.lora_a, layer.lora_b)]
    matrices = [matrix for part in parts for matrix in (part if isinstance(part, list) else [part])]
    return sorted(tensor_digest(matrix) for matrix in matrices if matrix is not None)


def _computed_values(model: torch.nn.Module) -> dict[str, int]:
    """Count, by class name, the values that a layer computes once and no checkpoint contains (positions).

    vLLM counts them among the values to load, and keeps them. Layers that have only buffers are included.
    """
    counts: dict[str, int] = {}
    for module in model.modules():
        if not hasattr(module, "quant_method"):
            computed = module._non_persistent_buffers_set
            elements = sum(
                buffer.numel() for name, buffer in module._buffers.items() if buffer is not None and name in computed
            )
            if elements or (module._buffers and not module._parameters):
                counts[type(module).__name__] = elements
    return counts


@contextmanager
def _watched_reload(computed: Mapping[str, int]) -> Iterator[None]:
    """Raise `RuntimeError` where vLLM only logs that a layer is incorrect after a reload.

    - A layer received no new weights. Layers with only buffers compute theirs and a tied head shares the embedding's
      weight, so their log line is dropped; it stays for other layers that need no weights.
    - A layer received fewer values than it holds ("delayed"), and vLLM leaves the others uninitialized. The loader
      sets the vocabulary's to zero, and vLLM keeps the `computed` ones.
    - A layer seemed full before all its values had arrived, and vLLM dropped the rest ("excessive"). Linear layers
      are exempt: fused ones have a shape for each part, and one is enough.
    """
    always_loaded = ("Linear", "VocabParallelEmbedding", "Norm")
    weightless = ("ParallelLMHead", *computed)
    allowed = {"Delayed processing": ("VocabParallelEmbedding", "ParallelLMHead"), "Excessive loading": ("Linear",)}
    stale: list[str] = []
    undefined: list[str] = []
    missing: dict[str, int] = {}  # values that the last loaded layer still lacks, by class

    def should_log(record: logging.LogRecord) -> bool:
        layer, _, event = record.getMessage().partition(": ")
        if progress := re.fullmatch(r"(\d+) / (\d+)", event):
            missing[layer] = int(progress[2]) - int(progress[1])
        is_computed = event == "Delayed processing" and missing.get(layer) == computed.get(layer)
        if event in allowed and not layer.endswith(allowed[event]) and not is_computed:
            undefined.append(layer)
        if event != "Failed to load weights":
            return record.levelno >= visible
        if layer.endswith(always_loaded) and layer not in weightless:
            stale.append(layer)
        return layer not in weightless and not layer.endswith(always_loaded)

    reload_logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level, visible = reload_logger.level, reload_logger.getEffectiveLevel()
    reload_logger.setLevel(logging.DEBUG)  # vLLM logs the last two at this level
    reload_logger.addFilter(should_log)
    try:
        yield
    finally:
        reload_logger.removeFilter(should_log)
        reload_logger.setLevel(level)
    if undefined:
        raise RuntimeError(
            f"A part of these layers' values is undefined after a reload: {', '.join(sorted(set(undefined)))}. A "
            "tensor was missing, or this vLLM cannot reload such layers: use a model without them, or another "
            "version of vLLM."
        )
    if stale:
        raise RuntimeError(
            f"The engine got no new weights for {len(stale)} of its layers ({', '.join(sorted(set(stale)))}): the "
            "weights that were sent do not belong to the model that it serves."
        )
