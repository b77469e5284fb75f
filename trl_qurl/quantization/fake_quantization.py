"""The quantized policy's forward pass, computed by the trainer: what the engine should say.

Weights and activations are rounded as the scheme says. Slow, and only used to check the engine on a few tokens.
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from trl_qurl.quantization.layers import checkpoint_name
from trl_qurl.quantization.schemes import QuantizationScheme


@contextmanager
def quantized_forward(model: nn.Module, layers: Collection[str], scheme: QuantizationScheme) -> Iterator[None]:
    """Let the named linear layers compute with quantized weights and activations inside the block."""

    def replace_output(module: nn.Linear, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        weight = scheme.dequantize(scheme.quantize(module.weight)).to(output.dtype)
        bias = None if module.bias is None else module.bias.to(output.dtype)
        return nn.functional.linear(scheme.quantize_activations(inputs[0].to(output.dtype)), weight, bias)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and checkpoint_name(name) in layers:
                hooks.enter_context(module.register_forward_hook(replace_output))
        yield
