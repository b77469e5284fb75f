"""The engine's rounding in the trainer: a quantized forward pass, and a frozen base with rounded
weights.

In the forward pass, which has no gradient, linear layers round their weights and inputs as the plan
says, and multiply in the trainer's own dtype. Experts stay exact.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trl_qurl.quantization.checkpoint_form import whole
from trl_qurl.quantization.layers import linear_layers
from trl_qurl.quantization.merging import merged_layer
from trl_qurl.quantization.plan import QuantizationPlan, format_name
from trl_qurl.quantization.scheme import QuantizationScheme
from trl_qurl.quantization.smoothing import Smoothing


@dataclass(frozen=True)
class QuantizedLinear:
    """A linear layer's function with rounded weights and inputs."""

    layer: Any  # the exact one
    scheme: QuantizationScheme
    # of smoothing: divides inputs and multiplies columns, (in,)
    input_scale: torch.Tensor | None = None
    # to which weights are rounded first (`WeightStream.grid`), unless merged
    grid: torch.dtype | None = None
    # of those rounded weights: a sync's, where FSDP computes with 16-bit copies
    dtype: torch.dtype | None = None
    adapted: Any = None  # PEFT's layer around it, if the engine got that merged
    is_rounded: bool = False  # whether the layer has the engine's values (`round_base`)

    @torch.no_grad()
    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Multiply rounded inputs with rounded weights, in the dtype that the exact layer would
        use.
        """
        device = inputs.device.type
        exact = (
            dict(self.layer.named_parameters())
            if self.adapted is None
            else merged_layer(self.adapted)
        )
        dtype = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else inputs.dtype
        )
        x = inputs.to(dtype)  # the engine also rounds inputs in its compute dtype
        if self.input_scale is not None:
            x = (x / self.input_scale.to(x.device)).to(dtype)
        x = self.scheme.quantize_activations(x)
        bias = exact["bias"].to(dtype) if "bias" in exact else None
        return nn.functional.linear(x, self._rounded(exact["weight"], dtype), bias)

    def _rounded(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight that the engine's codes represent, (out, in)."""
        if self.is_rounded:
            return weight.to(dtype)
        if self.grid is not None and self.adapted is None:
            weight = weight.to(self.grid).to(self.dtype or weight.dtype)
        if self.input_scale is not None:
            weight = (weight * self.input_scale.to(weight.device)).to(weight.dtype)
        return self.scheme.dequantize(self.scheme.quantize(weight), dtype).to(dtype)


@contextmanager
def quantized_forward(
    model: nn.Module,
    plan: QuantizationPlan,
    smoothing: Smoothing | None = None,
    grid: torch.dtype | None = None,
    merges: bool = False,  # whether the engine got adapters merged into the weights
    is_rounded: bool = False,  # whether the layers have the engine's values
) -> Iterator[None]:
    """Run linear layers quantized by the plan inside the context, with the engine's smoothing and
    grid, if any.
    """
    tuners: list[Any] = [each for each in model.modules() if merges and hasattr(each, "base_layer")]
    # by the outermost around a layer
    adapted = {each.get_base_layer(): each for each in reversed(tuners)}
    modules: list[Any] = []
    for name, layer in linear_layers(model, plan.schemes):
        scale = smoothing.input_scale(name) if smoothing else None
        modules.append(adapted.get(layer, layer))
        form = plan.schemes[name], scale, grid, layer.weight.dtype, adapted.get(layer), is_rounded
        modules[-1].forward = QuantizedLinear(layer, *form)  # hides its class's
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def round_base(model: Any, plan: QuantizationPlan, dtype: torch.dtype) -> None:
    """Replace weights, in place, with the values of their codes in an engine of this dtype, and
    record the formats.

    The frozen base below an adapter then computes with the engine's weights. Raises as
    `check_unrounded` does.
    """
    check_unrounded(model)
    for name, module in linear_layers(model, plan.schemes):
        scheme, weight = plan.schemes[name], module.weight
        if not weight.is_meta:
            with torch.no_grad(), whole([weight]):
                weight.copy_(scheme.dequantize(scheme.quantize(weight.float()), dtype))
    model.config.rounded_base = format_name(plan.formats)


def check_unrounded(model: Any) -> None:
    """Raise `ValueError` for a model with weights that `round_base` has replaced."""
    if (rounded := getattr(model.config, "rounded_base", None)) is not None:
        raise ValueError(
            f"The weights of this model were rounded to {rounded} before (round_base), and "
            "rounding them again would change the codes: load the original model again."
        )
