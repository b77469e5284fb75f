"""The experts of a layer: three-dimensional parameters in transformers, one matrix per expert in a checkpoint.

Names and splits follow llm-compressor, which converts experts to linear layers before it quantizes them.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of experts' weights in transformers; biases append `_bias`."""


def expert_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules that hold experts in three-dimensional parameters, with their names."""
    for name, module in model.named_modules():
        weight = getattr(module, "down_proj", None)
        # transformers' `use_experts_implementation` sets flags such as this one, which describe the weights' layout.
        if isinstance(weight, nn.Parameter) and hasattr(module, "is_transposed"):
            yield name, module


def expert_layers(layers: Iterable[str]) -> list[str]:
    """Return the layers that belong to experts."""
    return [layer for layer in layers if ".experts." in layer]


def split_experts(experts: Any, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Split one parameter of an experts module into each expert's parts, as views.

    Args:
        experts: The module.
        name: The parameter's name in the module.
        tensor: The parameter, (experts, out, in) or (experts, in, out), or a bias, (experts, out).

    Yields:
        The part's name in the module, such as `3.gate_proj.weight`, and the part, (out, in) or (out,).
    """
    is_bias = name.endswith("_bias")
    layer, kind = name.removesuffix("_bias"), "bias" if is_bias else "weight"
    for index, part in enumerate(tensor):
        matrix = part.T if experts.is_transposed and not is_bias else part
        if layer == "gate_up_proj":
            gate, up = matrix.chunk(2) if experts.is_concatenated else (matrix[0::2], matrix[1::2])
            yield f"{index}.gate_proj.{kind}", gate
            yield f"{index}.up_proj.{kind}", up
        else:
            yield f"{index}.{layer}.{kind}", matrix
