"""Adapters on INT8 layers, on a CPU (report 13).

Adapter layers read the device of the base layer's weight, but the oneDNN INT8 kernel has removed
that weight. Without this loader, an engine with `enable_lora` does not start.
"""

from dataclasses import replace
from typing import Any

import torch
from vllm.config import LoadConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Int8,
)
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from trl_qurl.rollout.wire import CPU_LOAD_FORMAT

REPORTS = (13,)
SEEN_IN = "vllm 0.32"
UNNECESSARY_FROM = None


@register_model_loader(CPU_LOAD_FORMAT)
class CPUModelLoader(DefaultModelLoader):
    """vLLM's loader, extended to add an empty weight where an INT8 kernel has removed it."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def load_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:  # noqa: D102
        model = super().load_model(*args, **kwargs)
        for layer in model.modules():
            scheme = getattr(layer, "scheme", None)
            if isinstance(scheme, CompressedTensorsW8A8Int8) and layer.weight is None:
                layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        return model
