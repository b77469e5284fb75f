"""Round and pack weights as compressed-tensors does, whose checkpoint formats vLLM loads.

`library_scheme` and `args` are its `QuantizationScheme` and `QuantizationArgs`. Imports are local
because they take a second.
"""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

FUSED_ON = "cuda"
"""Type of the devices on which one kernel makes all passes, if Triton is installed."""


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
    from compressed_tensors.quantization.utils import calculate_qparams

    args = library_scheme.weights
    height, width = args.block_structure or (1, args.group_size or weight.shape[1])
    # (rows, height, columns, width)
    blocks = weight.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    has_plain_codes = args.num_bits in PACKS and args.symmetric and args.scale_dtype is None
    if has_plain_codes and weight.shape[1] % 8 == 0:
        codes, scale = _rounded(blocks, args)
        is_packed = checkpoint_format == "pack-quantized"
        if is_packed:
            codes = PACKS[args.num_bits](codes.view(torch.uint8)).view(torch.int32)
        tensors = {"weight_packed" if is_packed else "weight": codes, "weight_scale": scale}
    else:
        scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(scale.dtype)}
        compressor = BaseCompressor.get_value_from_registry(checkpoint_format)
        tensors = compressor.compress(state, library_scheme)
    if "weight_packed" in tensors:
        tensors["weight_shape"] = torch.tensor(weight.shape, device=weight.device)
    return dict(sorted(tensors.items()))  # the same order everywhere


def _rounded(blocks: torch.Tensor, args: "QuantizationArgs") -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the library's codes, (out, in), and scales, (rows, columns).

    On a CPU this takes a part of its time. On a GPU the library divides 16-bit weights in float32
    (Triton), and other codes would follow than on a CPU.
    """
    from compressed_tensors.quantization.utils import calculate_qparams, calculate_range

    low, high = (limit.item() for limit in calculate_range(args, torch.device("cpu")))
    dtype: torch.dtype = args.pytorch_dtype()
    blocks = blocks.contiguous()
    is_fused = blocks.device.type == FUSED_ON and blocks.itemsize < 8
    if is_fused and find_spec("triton") is not None:
        from trl_qurl.quantization.kernels import round_blocks

        codes = torch.empty_like(blocks, dtype=None if dtype.is_floating_point else dtype)
        scale = blocks.new_empty(blocks.shape[::2])
        round_blocks(blocks, codes, scale, low, high)
    else:
        scale, _ = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
        codes = (blocks / scale[:, None, :, None]).clamp_(low, high)
        if dtype.is_floating_point:
            codes.add_(0.0)  # makes FP8's negative zeros positive, as in llm-compressor
        else:
            codes.round_()
    return codes.to(dtype).flatten(2).flatten(0, 1), scale


def dequantize(tensors: Mapping[str, torch.Tensor], args: "QuantizationArgs") -> torch.Tensor:
    """Return the weight, (out, in), in the dtype of its scales."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.quantization.lifecycle import forward

    scale = tensors["weight_scale"]
    if "weight_packed" in tensors:
        shape = torch.Size(tensors["weight_shape"].tolist())
        codes = unpack_from_int32(tensors["weight_packed"], args.num_bits, shape)
    else:
        codes = tensors["weight"]
    weight: torch.Tensor = forward.dequantize(codes.to(scale.dtype), scale, args=args)
    return weight
