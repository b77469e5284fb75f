"""Fixes for four bugs in the CPU build of vLLM 0.31, with vLLM's own functions; imported only
there. In a reload:

- The oneDNN INT8 kernel (CPUs without AMX) keeps a pointer to scales that a reload frees, so its
  outputs become noise.
- A tied output head multiplies with a packed copy of the embedding that a reload does not update,
  so it keeps the weights that the engine started with.
- 16-bit experts are packed for their kernel only at the first load. Later loads leave them
  unpacked, and the kernel reads noise.

At startup, adapter layers read the device of the base layer's weight, but the INT8 kernel has
removed that weight.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from vllm.config import LoadConfig
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Int8,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from trl_qurl.rollout.wire import CPU_LOAD_FORMAT


class ReloadableCPUInt8Kernel(CPUInt8ScaledMMLinearKernel):
    """vLLM's INT8 kernel for CPUs that keeps alive the scales its oneDNN primitive points to."""

    def process_weights_for_onednn(self, layer: torch.nn.Module) -> None:
        """Build the primitive, and keep its scales alive until the next one is built."""
        super().process_weights_for_onednn(layer)
        self._scales_in_use = getattr(layer, self.layer_param_names[1])


def replace_kernels(model: torch.nn.Module) -> None:
    """Replace vLLM's INT8 kernels with ours, and drop those of 16-bit experts, so that a reload
    packs them again.
    """
    # To register ours with vLLM, a variable that disables vLLM's own is needed, which later
    # processes would inherit.
    for layer in model.modules():
        scheme, method = getattr(layer, "scheme", None), getattr(layer, "quant_method", None)
        if (
            isinstance(scheme, CompressedTensorsW8A8Int8)
            and type(scheme.kernel) is CPUInt8ScaledMMLinearKernel
        ):
            scheme.kernel = ReloadableCPUInt8Kernel(
                scheme.kernel.config, scheme.kernel.layer_param_names
            )
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def repack_output_head(model: torch.nn.Module) -> None:
    """Give a tied output head the packed copy that a reload of the embedding has made; let any
    other pack its own.
    """
    packed = {
        id(layer.weight): layer.cpu_linear
        for layer in model.modules()
        if type(layer) is VocabParallelEmbedding and hasattr(layer, "cpu_linear")
    }
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and isinstance(
            layer.quant_method, UnquantizedEmbeddingMethod
        ):
            if id(layer.weight) in packed:
                layer.cpu_linear = packed[id(layer.weight)]
            else:
                layer.quant_method.process_weights_after_loading(layer)


@contextmanager
def repaired_reload(model: torch.nn.Module) -> Iterator[None]:
    """Repair what vLLM's own reload of a model breaks, if it runs inside the block."""
    replace_kernels(model)
    yield
    repack_output_head(model)


@register_model_loader(CPU_LOAD_FORMAT)
class CPUModelLoader(DefaultModelLoader):
    """vLLM's loader, extended to add an empty weight where an INT8 kernel has removed it."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def load_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:  # noqa: D102
        model = super().load_model(*args, **kwargs)
        for layer in model.modules():
            if (
                isinstance(getattr(layer, "scheme", None), CompressedTensorsW8A8Int8)
                and layer.weight is None
            ):
                layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        return model
