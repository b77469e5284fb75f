"""A frozen base below an adapter, with the values that the engine's codes represent."""

from typing import Any

import torch

from trl_qurl.quantization.checkpoint_form import whole
from trl_qurl.quantization.layers import linear_layers
from trl_qurl.quantization.plan import QuantizationPlan, format_name


def round_base(model: Any, plan: QuantizationPlan, dtype: torch.dtype) -> None:
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


def check_unrounded(model: Any) -> None:
    """Raise `ValueError` for a model with weights that `round_base` has replaced."""
    rounded = getattr(model.config, "rounded_base", None)
    if rounded is not None:
        raise ValueError(
            f"The weights of this model were rounded to {rounded} before (round_base), and "
            "rounding them again would change the codes: load the original model again."
        )
