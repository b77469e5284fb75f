"""Layers that update-aware quantization cannot scale."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_enabled


def checked_weight(modules: Mapping[str, nn.Module], name: str, cls: type[nn.Module]) -> Any:
    """Return the weight of a module; raise `ValueError` if it cannot be scaled in place here."""
    module = modules.get(name)
    weight: Any = getattr(module, "weight", None)
    is_plain = isinstance(module, cls) and isinstance(weight, nn.Parameter)
    if not is_plain or not weight.is_floating_point():
        raise ValueError(
            f"UAQ needs a plain floating-point layer {name} and found {type(module).__name__} "
            f"({getattr(weight, 'dtype', 'no weight')}): load the model without adapters, fused or "
            "quantized layers, or set uaq_scale=1.0."
        )
    # ZeRO-3 gathers its shards later. FSDP may load only on the first process, which sends its
    # scaled weights.
    arrives_later = is_deepspeed_zero3_enabled() or is_fsdp_enabled()
    if (weight.is_meta or weight.numel() == 0) and not arrives_later:
        raise ValueError(
            f"The weight of {name} is not in memory here: shape {tuple(weight.shape)}, device "
            f"{weight.device}. Scale the checkpoint in advance, in one process: from_pretrained, "
            "scale_model_, save_pretrained. Or set uaq_scale=1.0."
        )
    return weight
