"""Symmetric rounding, as llm-compressor does it: the arithmetic that the schemes share."""

from collections.abc import Iterator

import torch

CACHED_ELEMENTS = 512 * 1024
"""Elements rounded at a time on CPU: 2 MB of float32, which fit into the second-level cache."""


def channel_chunks(weight: torch.Tensor) -> Iterator[slice]:
    """
    Slices of the output channels of a weight, (out, in), that are rounded one after the other.

    Channels are independent. On CPU a few at a time stay in cache between the passes over them.
    """
    count = weight.shape[0]
    size = count if weight.is_cuda else max(1, CACHED_ELEMENTS // max(1, weight.shape[1]))
    return (slice(first, first + size) for first in range(0, count, max(1, size)))


def divide_by_scale(weight: torch.Tensor, code_min: float, code_max: float) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    Bring weights into the range of the codes, with one scale for each run of the last dimension.

    $$s = \max_j |W_j| / h, \qquad X_j = \mathrm{clip}(W_j / s, q_{min}, q_{max})$$

    Where $h$ is half the width of the code range: llm-compressor spreads absmax over all 255 steps of [-128, 127], so
    half the range is 127.5, not 127. A run of zeros gets the smallest step of its dtype as its scale. All arithmetic
    is in the weight's own dtype, as in llm-compressor: quantize float32 master weights if there are any, because in
    bfloat16 the quotient itself is rounded (to 0.5 near 127) before it becomes a code.

    Args:
        weight: Full-precision weights, (..., n). Not modified.
        code_min: Smallest code.
        code_max: Largest code.

    Returns:
        The quotients, (..., n), to be rounded to codes, and the scales, (..., 1), both in the weight's dtype.
    """
    # Two reductions instead of abs().amax(): no temporary of the weight's size.
    absmax = torch.maximum(weight.amax(dim=-1, keepdim=True), weight.amin(dim=-1, keepdim=True).neg())  # (..., 1)
    scale = absmax / ((code_max - code_min) / 2)
    scale.masked_fill_(scale == 0, torch.finfo(scale.dtype).eps)
    return (weight / scale).clamp_(code_min, code_max), scale
