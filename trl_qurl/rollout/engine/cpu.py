"""Four things that the CPU build of vLLM 0.31 does incorrectly, fixed with vLLM's own functions. At a reload:

- The oneDNN INT8 kernel (CPUs without AMX) keeps a pointer to scales that a reload frees: its outputs become noise.
- A tied output head multiplies with a packed copy of the embedding that a reload does not update: it keeps the weights
  that the engine started with.
- Experts in 16 bits are packed for their kernel at the first load only: later ones leave them unpacked, and the kernel
  reads noise.

At the start: layers for adapters ask the weight of the layer below for its device, and the INT8 kernel has left none.

Imported only where vLLM runs on CPU.
"""

from dataclasses import replace
from typing import Any

import torch
from vllm.config import LoadConfig
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Int8
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from trl_qurl.rollout.engine.interface import CPU_LOAD_FORMAT


class ReloadableCPUInt8Kernel(CPUInt8ScaledMMLinearKernel):
    """vLLM's INT8 kernel for CPUs, which keeps the scales that its oneDNN primitive points to."""

    def process_weights_for_onednn(self, layer: torch.nn.Module) -> None:
        """Build the primitive, and keep what it refers to alive until the next one is built."""
        super().process_weights_for_onednn(layer)
        self._scales_in_use = getattr(layer, self.layer_param_names[1])


def use_reloadable_int8_kernels(model: torch.nn.Module) -> None:
    """Replace vLLM's INT8 kernel by `ReloadableCPUInt8Kernel`, before a reload prepares each layer with the kernel.

    Registering the kernel with vLLM instead would need an environment variable that disables vLLM's own, and later
    processes would inherit it.
    """
    for layer in model.modules():
        scheme = getattr(layer, "scheme", None)  # only quantized layers have one
        if isinstance(scheme, CompressedTensorsW8A8Int8) and type(scheme.kernel) is CPUInt8ScaledMMLinearKernel:
            scheme.kernel = ReloadableCPUInt8Kernel(scheme.kernel.config, scheme.kernel.layer_param_names)


def drop_expert_kernels(model: torch.nn.Module) -> None:
    """Drop the kernels of experts in 16 bits before a reload, which then builds new ones and packs the weights."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def repack_output_head(model: torch.nn.Module) -> None:
    """Let an unquantized output head multiply with the weight that it holds now.

    A tied head takes the packed copy that a reload of the embedding has just made. Any other head packs its own.
    """
    packed = {
        id(layer.weight): layer.cpu_linear
        for layer in model.modules()
        if type(layer) is VocabParallelEmbedding and hasattr(layer, "cpu_linear")
    }
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
            if id(layer.weight) in packed:
                layer.cpu_linear = packed[id(layer.weight)]
            else:
                layer.quant_method.process_weights_after_loading(layer)


@register_model_loader(CPU_LOAD_FORMAT)
class CPUModelLoader(DefaultModelLoader):
    """vLLM's loader, which leaves an empty weight where an INT8 kernel has taken it away."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def load_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:  # noqa: D102
        return with_empty_weights(super().load_model(*args, **kwargs))


def with_empty_weights(model: torch.nn.Module) -> torch.nn.Module:
    """Give layers whose INT8 kernel holds the real weight an empty one, which has a device."""
    for layer in model.modules():
        if isinstance(getattr(layer, "scheme", None), CompressedTensorsW8A8Int8) and layer.weight is None:
            layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    return model
