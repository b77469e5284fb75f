"""Which weights a format can store."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs


def storage_obstacle(
    args: "QuantizationArgs", shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> str | None:
    """Return in a clause why a format cannot store a weight; `None` if it can.

    llm-compressor would pad blocks, but vLLM's kernels reject that.
    """
    if len(shape) != 2:
        return f"its weight has the shape {tuple(shape)}, not (out, in)"
    if not dtype.is_floating_point:
        return f"its weight is of dtype {dtype}, not a floating-point dtype"
    outputs, inputs = shape
    if args.block_structure:
        height, width = args.block_structure
        if outputs % height or inputs % width:
            return (
                f"its weight of {outputs} x {inputs} is not made of whole blocks of {height} "
                f"x {width}"
            )
    if args.group_size and inputs % args.group_size:
        return f"it has {inputs} inputs, not a multiple of the group size {args.group_size}"
    return None
