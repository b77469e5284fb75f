"""Quantize and dequantize a layer's inputs as vLLM's kernels do.

The kernels differ from compressed-tensors: for INT8 they map a token's largest input to 127, not
127.5.
"""

import torch

LARGEST_FP8 = 448.0
# Blockwise FP8 kernels clamp the absmax of a group of inputs to this.
SMALLEST_GROUP_ABSMAX = 1e-10


def exact(inputs: torch.Tensor) -> torch.Tensor:
    """Leave inputs as they are."""
    return inputs


def int8_per_token(inputs: torch.Tensor) -> torch.Tensor:
    """Round to INT8 with one scale per token.

    $$s = \\max_j |x_j| / 127, \\qquad \\hat x_j = s \\cdot \\mathrm{round}(x_j / s)$$

    Takes and returns the inputs of a layer, (..., in), in the same dtype.
    """
    scale = _token_scale(inputs, 127.0)
    codes = (inputs.float() / scale).clamp(-127.0, 127.0).round()
    return (codes * scale).to(inputs.dtype)


def fp8_per_token(inputs: torch.Tensor) -> torch.Tensor:
    """Round to FP8 (E4M3) with one scale per token; see `int8_per_token`."""
    scale = _token_scale(inputs, LARGEST_FP8)
    codes = to_fp8(inputs.float() / scale)
    return (codes * scale).to(inputs.dtype)


def fp8_per_group(inputs: torch.Tensor, size: int = 128) -> torch.Tensor:
    """Round to FP8 (E4M3) with one scale per token and group of `size` inputs."""
    groups = inputs.float().unflatten(-1, (-1, size))  # (..., groups, size)
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_GROUP_ABSMAX)
    scale = divide_exactly(largest, LARGEST_FP8)
    codes = to_fp8(groups / scale)
    return (codes * scale).flatten(-2).to(inputs.dtype)


def divide_exactly(tensor: torch.Tensor, number: float) -> torch.Tensor:
    """Divide by a number with the same rounding on every device.

    CUDA multiplies by the reciprocal of a Python number, which changes the last bit of most float32
    scales.
    """
    return tensor / tensor.new_full((), number)


def _token_scale(inputs: torch.Tensor, largest_code: float) -> torch.Tensor:
    largest = inputs.float().abs().amax(-1, keepdim=True)  # (..., 1)
    scale = divide_exactly(largest, largest_code)
    return torch.where(scale == 0, 1.0, scale)


def to_fp8(quotient: torch.Tensor) -> torch.Tensor:
    """Round to FP8 (E4M3) without a scale, so that larger numbers become 448."""
    return quotient.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).to(quotient.dtype)


ACTIVATIONS = {
    "int8": int8_per_token,
    "fp8": fp8_per_token,
    "fp8_block": fp8_per_group,
}
"""By format. Others leave activations exact; one of your own may add itself."""


def round_activations(inputs: torch.Tensor, form: str) -> torch.Tensor:
    """Round (..., in) as the kernels of a format do.

    Args:
        inputs: Of a linear layer.
        form: The format's name.

    Returns:
        The rounded inputs, in the same dtype.
    """
    return ACTIVATIONS.get(form, exact)(inputs)
