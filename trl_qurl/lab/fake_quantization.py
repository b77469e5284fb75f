"""A forward pass with the engine's rounding, without an engine.

Linear layers round their weights and inputs as the plan says, and multiply in the model's own
dtype. There is no gradient. Experts stay exact.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trl_qurl.lab.activations import round_activations
from trl_qurl.quantization.layers import linear_layers
from trl_qurl.quantization.plan import QuantizationPlan
from trl_qurl.quantization.scheme import QuantizationScheme
from trl_qurl.quantization.smoothing import Smoothing


@dataclass(frozen=True)
class QuantizedLinear:
    """A linear layer's function with rounded weights and inputs."""

    layer: nn.Linear  # the exact one
    scheme: QuantizationScheme
    input_scale: torch.Tensor | None = None  # of smoothing, (in,): divides inputs

    @torch.no_grad()
    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Multiply rounded inputs with rounded weights, in the dtype of the exact layer."""
        weight = self.layer.weight
        bias = self.layer.bias
        device = inputs.device.type
        dtype = inputs.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        x = inputs.to(dtype)  # the engine also rounds inputs in its compute dtype
        if self.input_scale is not None:
            x = (x / self.input_scale.to(x.device)).to(dtype)
            weight = (weight * self.input_scale.to(weight.device)).to(weight.dtype)
        x = round_activations(x, self.scheme.name)
        rounded = self.scheme.dequantize(self.scheme.quantize(weight), dtype).to(dtype)
        return nn.functional.linear(x, rounded, None if bias is None else bias.to(dtype))


@contextmanager
def quantized_forward(
    model: nn.Module, plan: QuantizationPlan, smoothing: Smoothing | None = None
) -> Iterator[None]:
    """Run linear layers quantized by the plan, and smoothed, inside the context."""
    layers: list[Any] = []
    for name, layer in linear_layers(model, plan.schemes):
        scale = None if smoothing is None else smoothing.input_scale(name)
        layers.append(layer)
        # This hides the method of the layer's class.
        layers[-1].forward = QuantizedLinear(layer, plan.schemes[name], scale)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
