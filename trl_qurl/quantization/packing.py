"""Round and pack weights as compressed-tensors does, whose checkpoint formats vLLM loads.

`library_scheme` and `args` are its `QuantizationScheme` and `QuantizationArgs`. Imports are local
because they take a second.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

CACHED = 512 * 1024
"""Weights to round at a time on a CPU, so that passes after the first read their quotients from the
L2 cache: 2 MB."""

ON_GPU = 4 * 1024 * 1024
"""The same on a GPU: 16 MB. A launch takes as long as reading those (5 us, 3 TB/s), so smaller
parts would save no time."""


def pack_4_bits(codes: torch.Tensor) -> torch.Tensor:
    """Pack two signed codes into a byte, the first into its low half, and make them unsigned."""
    low = codes[:, ::2] & 15
    high = codes[:, 1::2] << 4
    return (low | high) ^ 0x88


def pack_8_bits(codes: torch.Tensor) -> torch.Tensor:
    """Make signed codes unsigned, one in each byte."""
    return codes ^ 0x80


# By number of bits; the library packs others.
PACKS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {4: pack_4_bits, 8: pack_8_bits}


def pack(
    weight: torch.Tensor, library_scheme: "QuantizationScheme", checkpoint_format: str
) -> dict[str, torch.Tensor]:
    """Round a weight matrix, (out, in), into the tensors for a checkpoint, by name.

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
    low = blocks.amin((1, 3))  # (rows, columns)
    high = blocks.amax((1, 3))
    scale, zero = calculate_qparams(low, high, args)
    is_fp4 = args.num_bits == 4 and args.type == "float"
    if is_fp4 or not args.symmetric or args.num_bits not in PACKS or weight.shape[1] % 8:
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(scale.dtype)}
        compressor = BaseCompressor.get_value_from_registry(checkpoint_format)
        tensors = compressor.compress(state, library_scheme)
    else:
        is_packed = checkpoint_format == "pack-quantized"
        name = "weight_packed" if is_packed else "weight"
        tensors = {name: _codes(blocks, scale, args, is_packed)}
        if args.scale_dtype:  # 255 is NaN; the library's cast makes any power of two of it
            is_finite = torch.isfinite(low).logical_and(torch.isfinite(high))
            scale = torch.where(is_finite, compress_mx_scale(scale, torch.uint8), 255)
        tensors["weight_scale"] = scale
    if "weight_packed" in tensors:
        tensors["weight_shape"] = torch.tensor(weight.shape, device=weight.device)
    return dict(sorted(tensors.items()))  # the same order everywhere


def _codes(
    blocks: torch.Tensor, scale: torch.Tensor, args: "QuantizationArgs", is_packed: bool
) -> torch.Tensor:
    """Compute the library's bits with PyTorch's operators alone.

    On a CPU this takes a third to two thirds of its time. On a GPU the library divides 16-bit
    weights in float32 (Triton), and other codes would follow than on a CPU.
    """
    from compressed_tensors.quantization.utils import calculate_range

    low, high = (limit.item() for limit in calculate_range(args, torch.device("cpu")))
    dtype: torch.dtype = args.pytorch_dtype()
    height = blocks.shape[1]
    width = blocks.shape[2:].numel()  # inputs of the layer
    at_a_time = CACHED if blocks.device.type == "cpu" else ON_GPU
    rows = max(1, at_a_time // (height * width))
    quotients = blocks.new_empty(blocks[:rows].shape)
    outputs = len(blocks) * height
    if is_packed:
        codes = blocks.new_empty((outputs, width * args.num_bits // 8), dtype=torch.uint8)
    else:
        codes = blocks.new_empty((outputs, width), dtype=dtype)
    parts = zip(blocks.split(rows), scale.split(rows), codes.split(rows * height), strict=True)
    for part, divisor, result in parts:
        quotient = torch.div(part, divisor[:, None, :, None], out=quotients[: len(part)])
        quotient.clamp_(low, high)
        if dtype.is_floating_point:
            quotient.add_(0.0)  # makes FP8's negative zeros positive, as in llm-compressor
        else:
            quotient.round_()
        quotient = quotient.view(-1, width)
        if is_packed:
            quotient = PACKS[args.num_bits](quotient.to(dtype).view(torch.uint8))
        result.copy_(quotient)
    if is_packed:
        codes = codes.view(torch.int32)
    return codes


def dequantize(tensors: Mapping[str, torch.Tensor], args: "QuantizationArgs") -> torch.Tensor:
    """Return the weight, (out, in), in the dtype of its scales.

    If those are powers of two, it is in float32.
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
