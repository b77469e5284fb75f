"""Symmetric rounding, as llm-compressor does it: the arithmetic that the schemes share."""

from collections.abc import Iterator

import torch

CACHED_ELEMENTS = 512 * 1024
"""Elements rounded at a time on CPU: 2 MB of float32 fit into the second-level cache."""


def channel_chunks(weight: torch.Tensor) -> Iterator[slice]:
    """Slices of output channels to round one after the other, so that on CPU each stays in cache."""
    count = weight.shape[0]
    size = count if weight.is_cuda else max(1, CACHED_ELEMENTS // max(1, weight.shape[1]))
    return (slice(first, first + size) for first in range(0, count, max(1, size)))


def divide_by_scale(weight: torch.Tensor, code_min: float, code_max: float) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Bring weights (..., n) into the range of the codes; return the unrounded quotients and the scales (..., 1).

    $$s = \max_j |W_j| / h, \qquad X_j = \mathrm{clip}(W_j / s, q_{min}, q_{max})$$

    Where $h$ is half the width of the code range: 127.5 for [-128, 127], not 127. A row of zeros gets the dtype's
    epsilon as its scale. As in llm-compressor, all arithmetic is in the weight's own dtype: quantize float32 master
    weights if there are any, because bfloat16 rounds the quotient itself (to 0.5 near 127) before it becomes a code.
    """
    # Two reductions instead of abs().amax(): no temporary of the weight's size.
    absmax = torch.maximum(weight.amax(dim=-1, keepdim=True), weight.amin(dim=-1, keepdim=True).neg())  # (..., 1)
    scale = divide_exactly(absmax, (code_max - code_min) / 2)
    scale.masked_fill_(scale == 0, torch.finfo(scale.dtype).eps)
    return (weight / scale).clamp_(code_min, code_max), scale


def divide_exactly(tensor: torch.Tensor, number: float) -> torch.Tensor:
    """`tensor / number`, rounded as on CPU on every device, and as llm-compressor does.

    CUDA multiplies by the reciprocal of a Python number, which is off by a bit in most of INT8's float32 scales.
    """
    return tensor / tensor.new_full((), number)


def to_fp8(quotient: torch.Tensor) -> torch.Tensor:
    """Round quotients within the range of E4M3 to its codes. Negative zeros become positive, as in llm-compressor."""
    return quotient.add_(0.0).to(torch.float8_e4m3fn)
