"""Round the frozen base below an adapter as the engine does, so trainer and engine compute with the same weights."""

from collections.abc import Collection
from typing import Any

import torch

from trl_qurl.quantization.layers import linear_layers
from trl_qurl.quantization.parameters import whole
from trl_qurl.quantization.scheme import QuantizationScheme


def round_base(model: Any, layers: Collection[str], scheme: QuantizationScheme, dtype: torch.dtype) -> None:
    """Replace weights, in place, with the values of their codes in an engine of this dtype, and record the format.

    Raises `ValueError` if the weights are already rounded, because rounding them again would change the codes.
    """
    check_unrounded(model)
    modules: list[Any] = [module for _, module in linear_layers(model, layers) if not module.weight.is_meta]
    for module in modules:
        with torch.no_grad(), whole([module.weight]):
            tensors = scheme.quantize(module.weight.float())
            module.weight.copy_(scheme.dequantize(scheme.in_engine(tensors, dtype)))
        module.is_rounded = True  # for `QuantizedLinear`
    model.config.rounded_base = scheme.name


def check_unrounded(model: Any) -> None:
    """Raise `ValueError` for a model with weights that `round_base` has replaced."""
    if (rounded := getattr(model.config, "rounded_base", None)) is not None:
        raise ValueError(
            f"The weights of this model were rounded to {rounded} before (round_base), and rounding them again would "
            "change the codes: load the original model again."
        )
