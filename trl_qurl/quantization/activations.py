"""Quantize and dequantize a layer's inputs as vLLM's kernels do.

The kernels differ from compressed-tensors: for INT8 they map a token's largest input to 127, not
127.5. For MXFP8 they raise a shared exponent only if the largest input would exceed 448.
"""

import torch

LARGEST_FP8 = 448.0
# to which blockwise FP8 kernels clamp the absmax of a group of inputs
SMALLEST_GROUP_ABSMAX = 1e-10

MANTISSA_BITS, LARGEST_FP8_EXPONENT = 23, 8  # of float32 and E4M3
BELOW_QUARTER = (1 << (MANTISSA_BITS - 2)) - 1
"""Adding this to a float32's bits raises the exponent if the mantissa exceeds 1.75; E4M3 ends at
1.75 * 2^8.
"""


def exact(inputs: torch.Tensor) -> torch.Tensor:
    """Leave inputs as they are."""
    return inputs


def int8_per_token(inputs: torch.Tensor) -> torch.Tensor:
    """Round to INT8 with one scale per token.

    $$s = \\max_j |x_j| / 127, \\qquad \\hat x_j = s \\cdot \\mathrm{round}(x_j / s)$$

    Takes and returns the inputs of a layer, (..., in), in the same dtype.
    """
    scale = _token_scale(inputs, 127.0)
    return ((inputs.float() / scale).clamp(-127.0, 127.0).round() * scale).to(inputs.dtype)


def fp8_per_token(inputs: torch.Tensor) -> torch.Tensor:
    """Round to FP8 (E4M3) with one scale per token; see `int8_per_token`."""
    scale = _token_scale(inputs, LARGEST_FP8)
    return (_to_fp8(inputs.float() / scale) * scale).to(inputs.dtype)


def fp8_per_group(inputs: torch.Tensor, size: int = 128) -> torch.Tensor:
    """Round to FP8 (E4M3) with one scale per token and group of `size` inputs; see
    `int8_per_token`.
    """
    groups = inputs.float().unflatten(-1, (-1, size))  # (..., groups, size)
    scale = divide_exactly(
        groups.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_GROUP_ABSMAX), LARGEST_FP8
    )
    return (_to_fp8(groups / scale) * scale).flatten(-2).to(inputs.dtype)


def mxfp8(inputs: torch.Tensor, size: int = 32) -> torch.Tensor:
    """Round to MXFP8: E4M3 with the smallest power of two per `size` inputs that brings them to at
    most 448.
    """
    groups = inputs.float().unflatten(-1, (-1, size))  # (..., groups, size)
    bits = groups.abs().amax(-1, keepdim=True).view(torch.int32) + BELOW_QUARTER
    # biased, as E8M0 stores it
    exponent = (bits >> MANTISSA_BITS).sub_(LARGEST_FP8_EXPONENT).clamp_(min=0)
    # Built from bits, because pow rounds differently on each device. 2^-127 is subnormal.
    scale = (
        torch.where(exponent == 0, 1 << (MANTISSA_BITS - 1), exponent << MANTISSA_BITS)
        .int()
        .view(torch.float32)
    )
    return (_to_fp8(groups / scale) * scale).flatten(-2).to(inputs.dtype)


def divide_exactly(tensor: torch.Tensor, number: float) -> torch.Tensor:
    """Divide by a number with the same rounding on every device.

    CUDA multiplies by the reciprocal of a Python number, which changes the last bit of most float32
    scales.
    """
    return tensor / tensor.new_full((), number)


def _token_scale(inputs: torch.Tensor, largest_code: float) -> torch.Tensor:
    scale = divide_exactly(inputs.float().abs().amax(-1, keepdim=True), largest_code)  # (..., 1)
    return torch.where(scale == 0, 1.0, scale)


def _to_fp8(quotient: torch.Tensor) -> torch.Tensor:
    return quotient.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).float()
