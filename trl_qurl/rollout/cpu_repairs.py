"""Two things that the CPU build of vLLM 0.31 reloads wrongly, and silently, put right with vLLM's own means.

- The oneDNN INT8 kernel (CPUs without AMX) keeps a pointer to scales that a reload frees: its outputs become noise.
- A tied output head multiplies with a packed copy of the embedding that a reload does not renew: it stays at the
start.

Imported only where vLLM runs on CPU.
"""

import os

import torch
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.platforms.interface import PlatformEnum


class ReloadableCPUInt8Kernel(CPUInt8ScaledMMLinearKernel):
    """vLLM's INT8 kernel for CPUs, holding on to the scales its oneDNN primitive points to."""

    def process_weights_for_onednn(self, layer: torch.nn.Module) -> None:
        """Build the primitive, and keep what it refers to alive until the next one."""
        super().process_weights_for_onednn(layer)
        self._scales_in_use = getattr(layer, self.layer_param_names[1])


def register_reloadable_int8_kernel() -> None:
    """
    Let vLLM choose `ReloadableCPUInt8Kernel` for INT8 layers.

    A registered kernel is tried after vLLM's own, so that one is told to step back, by vLLM's own setting for it.
    """
    register_linear_kernel(ReloadableCPUInt8Kernel, PlatformEnum.CPU, "int8")
    disabled = [name for name in os.environ.get("VLLM_DISABLED_KERNELS", "").split(",") if name]
    os.environ["VLLM_DISABLED_KERNELS"] = ",".join({*disabled, CPUInt8ScaledMMLinearKernel.__name__})


def repack_output_head(model: torch.nn.Module) -> None:
    """Pack the weight that an unquantized output head holds now, be it its own or the embedding's."""
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
            layer.quant_method.process_weights_after_loading(layer)
