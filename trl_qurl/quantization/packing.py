"""Round and pack weights with compressed-tensors, the library behind the checkpoint formats that vLLM loads.

`library_scheme` and `args` are its `QuantizationScheme` and `QuantizationArgs`. Imports are local because they take a
second.
"""

from collections.abc import Mapping
from typing import Any

import torch

CACHED, ON_GPU = 512 * 1024, 16 * 1024 * 1024
"""Weights to round at a time: on a CPU, 2 MB of float32 fit into the L2 cache; on a GPU, the limit saves memory."""


def pack(weight: torch.Tensor, library_scheme: Any, checkpoint_format: str) -> dict[str, torch.Tensor]:
    """Round a weight matrix, (out, in), and pack its codes into the tensors for a checkpoint, by name.

    `checkpoint_format` is the library's name for the storage format of the codes.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    compressor = BaseCompressor.get_value_from_registry(checkpoint_format)
    args = library_scheme.weights
    height = args.block_structure[0] if args.block_structure else 1
    rows = (CACHED if weight.device.type == "cpu" else ON_GPU) // weight.shape[1] // height * height
    chunks = []
    for chunk in weight.split(max(height, rows)):
        groups = _groups(chunk, args)
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        if args.strategy == "channel":
            chunks.append({"weight": _channel_codes(chunk, scale, args), "weight_scale": scale})
            continue
        # Adding a zero point of 0 makes FP8's negative zeros positive, as in llm-compressor.
        state = {"weight": chunk, "weight_scale": scale, "weight_zero_point": zero.to(scale.dtype)}
        chunks.append(compressor.compress(state, library_scheme))
    tensors = {name: _concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    if "weight_shape" in tensors:
        tensors["weight_shape"] = torch.tensor(weight.shape, device=weight.device)
    return dict(sorted(tensors.items()))  # the same order everywhere


def _channel_codes(weight: torch.Tensor, scale: torch.Tensor, args: Any) -> torch.Tensor:
    """Round to INT8 or FP8 in place: the library's bits in two thirds (INT8) or a third (FP8) of its time on a CPU."""
    from compressed_tensors.quantization.utils import calculate_range

    low, high = (limit.item() for limit in calculate_range(args, torch.device("cpu")))
    quotient = (weight / scale).clamp_(low, high)
    dtype: torch.dtype = args.pytorch_dtype()
    # Adding 0 makes FP8's negative zeros positive, as in llm-compressor.
    return (quotient.add_(0.0) if dtype.is_floating_point else quotient.round_()).to(dtype)


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


def _groups(weight: torch.Tensor, args: Any) -> torch.Tensor:
    """Return a view in which the weights that share a scale form the last dimension."""
    if args.block_structure:
        height, width = args.block_structure
        return weight.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2).flatten(2)
    return weight.unflatten(1, (-1, args.group_size or weight.shape[1]))


def _concatenate(chunks: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate along the first dimension, as bytes because autocast cannot promote FP8."""
    return torch.cat([chunk.view(torch.uint8) for chunk in chunks]).view(chunks[0].dtype)
