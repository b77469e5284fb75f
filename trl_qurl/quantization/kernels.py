"""Rounds a weight in one launch on a GPU, to the same bits as `packing.py` does step by step.

Needs Triton, which CUDA builds of PyTorch bring.
"""

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor


@triton.jit
def round_block(
    weights: tensor,
    codes: tensor,
    scales: tensor,
    low: tensor,
    high: tensor,
    eps: tensor,
    columns: tensor,
    HEIGHT: constexpr,
    WIDTH: constexpr,
    SIZE: constexpr,
    IS_FLOAT: constexpr,
) -> None:
    """Compute a block's scale and codes in PyTorch's steps. SIZE is a power of two above its own.

    A row holds `columns` blocks.
    """
    dtype = weights.dtype.element_ty
    block = tl.program_id(0).to(tl.int64)
    first = (block // columns * HEIGHT * columns + block % columns) * WIDTH
    index = tl.arange(0, SIZE)
    place = first + index // WIDTH * columns * WIDTH + index % WIDTH
    is_inside = index < HEIGHT * WIDTH
    weight = tl.load(weights + place, is_inside, 0.0).to(tl.float32)
    # Without signs, bits are in the order of what they mean, and NaN comes last.
    largest = tl.max(weight.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), (high - low) * 0.5)
    scale = scale.to(dtype).to(tl.float32)
    scale = tl.where(scale == 0, eps, scale)
    tl.store(scales + block, scale)
    quotient = tl.div_rn(weight, scale).to(dtype).to(tl.float32)
    quotient = tl.clamp(quotient, low, high)
    if IS_FLOAT:
        code = tl.where(quotient == 0, 0.0, quotient)  # zero has no sign, as in llm-compressor
    else:  # rounds half to even: next to 1.5 * 2^23 in float32, the lowest bits are integers
        code = (quotient + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    tl.store(codes + place, code, is_inside)


@torch.library.custom_op("trl_qurl::round_blocks", mutates_args=("codes", "scales"))
def round_blocks(
    blocks: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, low: float, high: float
) -> None:
    """Round blocks of weights, (rows, height, columns, width), contiguous and in 16 or 32 bits.

    Args:
        blocks: The weights.
        codes: Filled in with their codes, int8, or in the dtype of the weights, not yet cast to
            FP8. That of NaN is any.
        scales: Filled in with each block's scale, (rows, columns). That of NaN is NaN.
        low: Lowest code.
        high: Highest code.
    """
    _, height, columns, width = blocks.shape
    size = triton.next_power_of_2(height * width)
    with torch.cuda.device_of(blocks):
        round_block[(scales.numel(),)](
            blocks,
            codes,
            scales,
            low,
            high,
            torch.finfo(blocks.dtype).eps,
            columns,
            height,
            width,
            size,
            codes.is_floating_point(),
            num_warps=min(16, max(1, size // 1024)),
        )
