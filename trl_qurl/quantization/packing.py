"""Round and pack weights as compressed-tensors does, the library behind the checkpoint formats that vLLM loads.

`library_scheme` and `args` are its `QuantizationScheme` and `QuantizationArgs`. Imports are local because they take a
second.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

CACHED, ON_GPU = 512 * 1024, 16 * 1024 * 1024
"""Weights to round at a time: on a CPU, 2 MB of float32 fit into the L2 cache; on a GPU, the limit saves memory."""

# By number of bits; the library packs others. Integers become unsigned, and the first of a byte is its low half.
PACKS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    4: lambda codes: (codes[:, ::2] & 15 | codes[:, 1::2] << 4) ^ 0x88,
    8: lambda codes: codes ^ 0x80,
}


def pack(weight: torch.Tensor, library_scheme: Any, checkpoint_format: str) -> dict[str, torch.Tensor]:
    """Round a weight matrix, (out, in), and pack its codes into the tensors for a checkpoint, by name.

    `checkpoint_format` is the library's name for the storage format of the codes.
    """
    args = library_scheme.weights
    height, width = args.block_structure or (1, args.group_size or weight.shape[1])
    rows = (CACHED if weight.device.type == "cpu" else ON_GPU) // weight.shape[1] // height * height
    blocks = weight.unflatten(1, (-1, width)).unflatten(0, (-1, height))  # (rows, height, columns, width)
    chunks = [_pack_chunk(each, library_scheme, checkpoint_format) for each in blocks.split(max(1, rows // height))]
    tensors = {name: _concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    if "weight_packed" in tensors:
        tensors["weight_shape"] = torch.tensor(weight.shape, device=weight.device)
    return dict(sorted(tensors.items()))  # the same order everywhere


def _pack_chunk(blocks: torch.Tensor, library_scheme: Any, checkpoint_format: str) -> dict[str, torch.Tensor]:
    """Compute the library's bits with PyTorch's operators alone, in two thirds to a third of its time on a CPU.

    On a GPU the library divides 16-bit weights in float32 (Triton), and other codes would follow than on a CPU.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.mx_utils import compress_mx_scale
    from compressed_tensors.quantization.utils import calculate_qparams, calculate_range

    args = library_scheme.weights
    scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
    is_fp4 = args.num_bits == 4 and args.type == "float"
    if is_fp4 or not args.symmetric or args.num_bits not in PACKS or blocks.shape[2:].numel() % 8:
        weight = blocks.flatten(2).flatten(0, 1)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(scale.dtype)}
        return BaseCompressor.get_value_from_registry(checkpoint_format).compress(state, library_scheme)
    low, high = (limit.item() for limit in calculate_range(args, torch.device("cpu")))
    quotient = (blocks / scale[:, None, :, None]).clamp_(low, high).flatten(2).flatten(0, 1)
    dtype: torch.dtype = args.pytorch_dtype()
    # Adding 0 makes FP8's negative zeros positive, as in llm-compressor.
    codes = (quotient.add_(0.0) if dtype.is_floating_point else quotient.round_()).to(dtype)
    if checkpoint_format == "pack-quantized":
        packed = PACKS[args.num_bits](codes.view(torch.uint8)).view(torch.int32)
        return {"weight_packed": packed, "weight_scale": scale}
    return {"weight": codes, "weight_scale": compress_mx_scale(scale, torch.uint8) if args.scale_dtype else scale}


def dequantize(tensors: Mapping[str, torch.Tensor], args: Any) -> torch.Tensor:
    """Return the weight, (out, in), in the dtype of its scales, or in float32 if those are powers of two."""
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


def _concatenate(chunks: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate along the first dimension, as bytes because autocast cannot promote FP8."""
    return torch.cat([chunk.view(torch.uint8) for chunk in chunks]).view(chunks[0].dtype)
