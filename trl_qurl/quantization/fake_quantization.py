"""The quantized actor's forward pass, computed by the trainer: what the engine should say.

Codes and scales are those of `quantize_weight`; activations are rounded per token as the engine's kernels do it, at
run time. Slow, and only used to check the engine on a few tokens.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trl_qurl.quantization.layers import checkpoint_name
from trl_qurl.quantization.schemes import QuantizationScheme
from trl_qurl.quantization.weights import dequantize_weight, quantize_weight


@contextmanager
def quantized_forward(model: nn.Module, layers: Collection[str], scheme: QuantizationScheme) -> Iterator[None]:
    """
    Let the named linear layers of `model` compute with 8-bit weights and activations inside the block.

    Args:
        model: Full-precision model; its parameters are not touched.
        layers: Names of the quantized layers, from `quantized_layer_names`.
        scheme: Their format.
    """

    def replace_output(module: nn.Linear, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        weight = dequantize_weight(*quantize_weight(module.weight, scheme)).to(output.dtype)
        bias = None if module.bias is None else module.bias.to(output.dtype)
        return nn.functional.linear(quantize_activations(inputs[0].to(output.dtype), scheme), weight, bias)

    handles: list[Any] = [
        module.register_forward_hook(replace_output)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and checkpoint_name(name) in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def quantize_activations(activations: torch.Tensor, scheme: QuantizationScheme) -> torch.Tensor:
    """
    Round activations (..., features) with one scale per token, and back.

    vLLM's kernels divide by absmax / 127 (INT8) or absmax / 448 (FP8): activations leave the lowest INT8 code unused,
    where weights do not.
    """
    largest_code = scheme.code_max
    tokens = activations.float()
    scale = tokens.abs().amax(dim=-1, keepdim=True) / largest_code
    scale = torch.where(scale == 0, 1.0, scale)
    codes = (tokens / scale).clamp(-largest_code, largest_code)
    codes = codes.round() if scheme.rounds else codes.to(scheme.dtype).float()
    return (codes * scale).to(activations.dtype)
