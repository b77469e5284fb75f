"""16-bit experts that are packed only once, on a CPU (report 12).

vLLM packs them for their kernel at the first load. A reload leaves them unpacked, so without this
repair the kernel reads noise.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

REPORTS = (12,)
SEEN_IN = "vllm 0.32"
UNNECESSARY_FROM = None


@contextmanager
def around_reload(model: torch.nn.Module) -> Iterator[None]:
    """Drop the experts' kernels, so that a reload inside the block packs the experts again."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None
    yield
