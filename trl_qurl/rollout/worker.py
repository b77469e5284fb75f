"""What runs inside vLLM's workers: how new weights enter a layer.

vLLM takes this class by name (`--worker-extension-cls`, its official way to add a worker method) and it imports
nothing but vLLM, so the engine's environment needs no TRL. On CUDA it is vLLM's own reload. The CPU build of vLLM 0.31
reloads two things wrongly, silently, and both are put right here with vLLM's own means:

- the oneDNN INT8 kernel (CPUs without AMX) keeps a pointer to scales that a reload frees: its outputs become noise;
- a tied output head multiplies with a packed copy of the embedding that a reload does not renew: it stays at the
start.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from vllm.config import VllmConfig
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum


class RolloutWorker:
    """Methods that vLLM mixes into its worker class, whose attributes the first three are."""

    reload_weights: Callable[..., None]
    get_model: Callable[[], torch.nn.Module]
    vllm_config: VllmConfig

    def load_rollout_weights(
        self,
        weights_iterator: Iterable[tuple[str, torch.Tensor]] | None = None,
        weights_path: str | None = None,
    ) -> None:
        """
        Replace all weights in place by checkpoint-format tensors, from a stream or from a directory.

        Args:
            weights_iterator: `(name, tensor)` pairs; only inside the trainer's own process.
            weights_path: Checkpoint directory on a file system that this worker sees.
        """
        with _only_real_reload_failures():
            self.reload_weights(weights_iterator=weights_iterator, weights_path=weights_path)
        if current_platform.is_cpu():
            for layer in self.get_model().modules():
                if isinstance(layer, ParallelLMHead) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
                    layer.quant_method.process_weights_after_loading(layer)

    def rollout_format(self) -> dict[str, object]:
        """
        How the layers of this worker are quantized.

        Returns:
            `format`: compressed-tensors' name for the way codes are stored, another method's name, or `None`;
            `ignore`: patterns of the modules kept in full precision.
        """
        quantization = self.vllm_config.quant_config
        if quantization is None:
            return {"format": None, "ignore": []}
        if not isinstance(quantization, CompressedTensorsConfig):
            return {"format": quantization.get_name(), "ignore": []}
        return {"format": quantization.quant_format, "ignore": list(quantization.ignore)}


@contextmanager
def _only_real_reload_failures() -> Iterator[None]:
    """
    Silence vLLM's "Failed to load weights" for layers that no checkpoint has weights for.

    Rotary embeddings compute theirs, and a tied head shares the embedding's; every other layer named is news.
    """
    weightless = ("RotaryEmbedding", "RotaryEmbeddingInterleaved", "ParallelLMHead")

    def is_news(record: logging.LogRecord) -> bool:
        layer, _, event = record.getMessage().partition(": ")
        return not (event == "Failed to load weights" and layer.endswith(weightless))

    reload_logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    reload_logger.addFilter(is_news)
    try:
        yield
    finally:
        reload_logger.removeFilter(is_news)


class ReloadableCPUInt8Kernel(CPUInt8ScaledMMLinearKernel):
    """vLLM's INT8 kernel for CPUs, holding on to the scales its oneDNN primitive points to."""

    def process_weights_for_onednn(self, layer: torch.nn.Module) -> None:
        """Build the primitive, and keep what it refers to alive until the next one."""
        super().process_weights_for_onednn(layer)
        self._scales_in_use = getattr(layer, self.layer_param_names[1])


if current_platform.is_cpu():
    # A registered kernel is only tried after vLLM's own, so that one has to step back. Workers import this module
    # before they build the model.
    register_linear_kernel(ReloadableCPUInt8Kernel, PlatformEnum.CPU, "int8")
    disabled = [name for name in os.environ.get("VLLM_DISABLED_KERNELS", "").split(",") if name]
    os.environ["VLLM_DISABLED_KERNELS"] = ",".join({*disabled, CPUInt8ScaledMMLinearKernel.__name__})
