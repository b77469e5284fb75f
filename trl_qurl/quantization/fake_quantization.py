"""The engine's rounding in the trainer: a quantized forward pass, and a rounded frozen base.

In the forward pass, which has no gradient, linear layers round their weights and inputs as the plan
says, and multiply in the trainer's own dtype. Experts stay exact.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trl_qurl.quantization.checkpoint_form import whole
from trl_qurl.quantization.layers import linear_layers
from trl_qurl.quantization.merging import merged_layer
from trl_qurl.quantization.plan import QuantizationPlan, format_name
from trl_qurl.quantization.scheme import QuantizationScheme
from trl_qurl.quantization.smoothing import Smoothing

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class QuantizedLinear:
    """A linear layer's function with rounded weights and inputs."""

    layer: Any  # the exact one
    scheme: QuantizationScheme
    # Smoothing's, which divides inputs and multiplies columns, (in,).
    input_scale: torch.Tensor | None = None
    # The type that weights are rounded to first (`WeightStream.grid`), unless merged.
    grid: torch.dtype | None = None
    # The type of those rounded weights: a sync's, where FSDP computes with 16-bit copies.
    dtype: torch.dtype | None = None
    adapted: Any = None  # PEFT's layer around it, if the engine got that merged
    is_rounded: bool = False  # whether the layer has the engine's values (`round_base`)

    @torch.no_grad()
    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Multiply rounded inputs with rounded weights, in the dtype of the exact layer."""
        if self.adapted is None:
            exact = dict(self.layer.named_parameters())
        else:
            exact = merged_layer(self.adapted)
        device = inputs.device.type
        dtype = inputs.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        x = inputs.to(dtype)  # the engine also rounds inputs in its compute dtype
        if self.input_scale is not None:
            x = (x / self.input_scale.to(x.device)).to(dtype)
        x = self.scheme.quantize_activations(x)
        bias = exact.get("bias")
        if bias is not None:
            bias = bias.to(dtype)
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
    """Run linear layers quantized by the plan inside the context.

    They compute with the engine's smoothing and grid, if any.
    """
    adapted: dict[nn.Module, Any] = {}  # PEFT's layers, the outermost around each linear one
    modules: list[Any] = list(model.modules()) if merges else []
    for module in modules:
        if hasattr(module, "base_layer"):
            adapted.setdefault(module.get_base_layer(), module)
    replaced: list[Any] = []
    for name, layer in linear_layers(model, plan.schemes):
        outer = adapted.get(layer, layer)
        # This hides the method of the module's class.
        outer.forward = QuantizedLinear(
            layer,
            plan.schemes[name],
            input_scale=None if smoothing is None else smoothing.input_scale(name),
            grid=grid,
            dtype=layer.weight.dtype,
            adapted=adapted.get(layer),
            is_rounded=is_rounded,
        )
        replaced.append(outer)
    try:
        yield
    finally:
        for module in replaced:
            del module.forward


def round_base(model: "PreTrainedModel", plan: QuantizationPlan, dtype: torch.dtype) -> None:
    """Replace weights, in place, with the values of their codes in an engine of this dtype.

    The frozen base below an adapter then computes with the engine's weights. The model's config
    records the formats. Raises as `check_unrounded` does.
    """
    check_unrounded(model)
    for name, module in linear_layers(model, plan.schemes):
        scheme = plan.schemes[name]
        weight = module.weight
        if not weight.is_meta:
            with torch.no_grad(), whole([weight]):
                weight.copy_(scheme.dequantize(scheme.quantize(weight.float()), dtype))
    model.config.rounded_base = format_name(plan.formats)


def check_unrounded(model: "PreTrainedModel") -> None:
    """Raise `ValueError` for a model with weights that `round_base` has replaced."""
    rounded = getattr(model.config, "rounded_base", None)
    if rounded is not None:
        raise ValueError(
            f"The weights of this model were rounded to {rounded} before (round_base), and "
            "rounding them again would change the codes: load the original model again."
        )
