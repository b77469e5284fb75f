"""A bias without a loader, on a GPU (report 7).

Marlin's kernels for FP8 and all of Humming's replace a layer's bias by one that has lost its
loader, so without this repair the first reload of a model with biases fails. vLLM takes them on
request (`linear_backend`), and for formats that other packages register.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.model_executor.layers.linear import LinearBase

REPORTS = (7,)
SEEN_IN = "vllm 0.32"
UNNECESSARY_FROM = None


@contextmanager
def around_reload(model: torch.nn.Module) -> Iterator[None]:
    """Give each bias its loader again before a reload inside the block."""
    for layer in model.modules():
        if not isinstance(layer, LinearBase):
            continue
        bias = layer._parameters.get("bias")
        if bias is not None and not hasattr(bias, "output_dim"):
            bias.output_dim = 0
            bias.weight_loader = layer.weight_loader
    yield
