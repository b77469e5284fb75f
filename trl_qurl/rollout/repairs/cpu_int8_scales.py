"""Scales that a reload on a CPU frees under the INT8 kernel (report 10).

The oneDNN kernel, for CPUs without AMX, keeps a pointer to the scales of its weights. A reload
frees those, so without this repair every later output is noise.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Int8,
)

REPORTS = (10,)
SEEN_IN = "vllm 0.32"
UNNECESSARY_FROM = None


class ReloadableCPUInt8Kernel(CPUInt8ScaledMMLinearKernel):
    """vLLM's INT8 kernel for CPUs that keeps alive the scales its oneDNN primitive points to."""

    def process_weights_for_onednn(self, layer: torch.nn.Module) -> None:
        """Build the primitive, and keep its scales alive until the next one is built."""
        super().process_weights_for_onednn(layer)
        self._scales_in_use = getattr(layer, self.layer_param_names[1])


@contextmanager
def around_reload(model: torch.nn.Module) -> Iterator[None]:
    """Replace vLLM's INT8 kernels with ours before a reload inside the block."""
    # To register ours with vLLM, a variable that disables vLLM's own is needed, which later
    # processes would inherit.
    for layer in model.modules():
        scheme = getattr(layer, "scheme", None)
        if not isinstance(scheme, CompressedTensorsW8A8Int8):
            continue
        kernel = scheme.kernel
        if type(kernel) is CPUInt8ScaledMMLinearKernel:
            scheme.kernel = ReloadableCPUInt8Kernel(kernel.config, kernel.layer_param_names)
    yield
