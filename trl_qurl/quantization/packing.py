"""Round and pack weights as compressed-tensors does, the library behind the checkpoint formats that
vLLM loads.

`library_scheme` and `args` are its `QuantizationScheme` and `QuantizationArgs`. Imports are local
because they take a second.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

CACHED, ON_GPU = 512 * 1024, 4 * 1024 * 1024
"""Weights to round at a time, so that passes after the first read their quotients from the L2
cache: 2 MB on a CPU, 16 MB on a GPU. A launch takes as long as reading those (5 us, 3 TB/s), so
smaller parts would save no time."""

# By number of bits; the library packs others. Integers become unsigned, and the first of a byte is
# its low half.
PACKS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    4: lambda codes: (codes[:, ::2] & 15 | codes[:, 1::2] << 4) ^ 0x88,
    8: lambda codes: codes ^ 0x80,
}


def pack(
    weight: torch.Tensor, library_scheme: Any, checkpoint_format: str
) -> dict[str, torch.Tensor]:
    """Round a weight matrix, (out, in), and pack its codes into the tensors for a checkpoint, by
    name.

    `checkpoint_format` is the library's name for the storage format of the codes. The scale of a
    weight that is NaN or infinite is so, too (`find_not_finite`).
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.mx_utils import compress_mx_scale
    from compressed_tensors.quantization.utils import calculate_qparams

    args = library_scheme.weights
    height, width = args.block_structure or (1, args.group_size or weight.shape[1])
    # (rows, height, columns, width)
    blocks = weight.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))  # (rows, columns)
    scale, zero = calculate_qparams(low, high, args)
    is_fp4 = args.num_bits == 4 and args.type == "float"
    if is_fp4 or not args.symmetric or args.num_bits not in PACKS or weight.shape[1] % 8:
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(scale.dtype)}
        tensors = BaseCompressor.get_value_from_registry(checkpoint_format).compress(
            state, library_scheme
        )
    else:
        is_packed = checkpoint_format == "pack-quantized"
        tensors = {
            "weight_packed" if is_packed else "weight": _codes(blocks, scale, args, is_packed)
        }
        if args.scale_dtype:  # 255 is NaN; the library's cast makes any power of two of it
            is_finite = torch.isfinite(low).logical_and(torch.isfinite(high))
            scale = torch.where(is_finite, compress_mx_scale(scale, torch.uint8), 255)
        tensors["weight_scale"] = scale
    if "weight_packed" in tensors:
        tensors["weight_shape"] = torch.tensor(weight.shape, device=weight.device)
    return dict(sorted(tensors.items()))  # the same order everywhere


def _codes(blocks: torch.Tensor, scale: torch.Tensor, args: Any, is_packed: bool) -> torch.Tensor:
    """Compute the library's bits with PyTorch's operators alone, in two thirds to a third of its
    time on a CPU.

    On a GPU the library divides 16-bit weights in float32 (Triton), and other codes would follow
    than on a CPU.
    """
    from compressed_tensors.quantization.utils import calculate_range

    low, high = (limit.item() for limit in calculate_range(args, torch.device("cpu")))
    dtype: torch.dtype = args.pytorch_dtype()
    height, width = blocks.shape[1], blocks.shape[2:].numel()
    rows = max(1, (CACHED if blocks.device.type == "cpu" else ON_GPU) // (height * width))
    quotients = blocks.new_empty(blocks[:rows].shape)
    size = (len(blocks) * height, width * args.num_bits // 8 if is_packed else width)
    codes = blocks.new_empty(size, dtype=torch.uint8 if is_packed else dtype)
    parts = zip(blocks.split(rows), scale.split(rows), codes.split(rows * height), strict=True)
    for part, divisor, result in parts:
        quotient = torch.div(part, divisor[:, None, :, None], out=quotients[: len(part)]).clamp_(
            low, high
        )
        # Adding 0 makes FP8's negative zeros positive, as in llm-compressor.
        quotient = (quotient.add_(0.0) if dtype.is_floating_point else quotient.round_()).view(
            -1, width
        )
        result.copy_(
            PACKS[args.num_bits](quotient.to(dtype).view(torch.uint8)) if is_packed else quotient
        )
    return codes.view(torch.int32) if is_packed else codes


def dequantize(tensors: Mapping[str, torch.Tensor], args: Any) -> torch.Tensor:
    """Return the weight, (out, in), in the dtype of its scales, or in float32 if those are powers
    of two.
    """
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.quantization.lifecycle import forward

    scale = tensors["weight_scale"]
    if scale.dtype == torch.uint8:
        scale = decompress_mx_scale(scale).float()
    if "weight_packed" in tensors:
        shape = torch.Size(tensors["weight_shape"].tolist())
        codes = unpack_from_int32(tensors["weight_packed"], args.num_bits, shape)
    else:
        codes = tensors["weight"]
    weight: torch.Tensor = forward.dequantize(codes.to(scale.dtype), scale, args=args)
    return weight
