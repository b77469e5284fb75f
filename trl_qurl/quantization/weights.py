"""Full-precision tensors in, checkpoint-format 8-bit tensors out, one at a time.

This is all of the quantization that happens at each step of training. It calibrates nothing and keeps nothing, so a
stream of parameters of any size passes through it with one layer in memory. The result equals bit for bit what
llm-compressor writes to disk for the same weights, which `tests/test_quantization.py` holds it to.
"""

from collections.abc import Callable, Collection, Iterable, Iterator

import torch

from trl_qurl.quantization.schemes import QuantizationScheme

NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""Parameters under their checkpoint names."""

CACHED_ELEMENTS = 512 * 1024
"""Elements rounded at a time on CPU: 2 MB of float32, within the second-level cache and its neighbour."""

Observer = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Called with a layer's name, weight (out, in), codes (out, in) and scale (out, 1), none of which it may modify."""


@torch.no_grad()
def quantize_weight(weight: torch.Tensor, scheme: QuantizationScheme) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    Round one weight matrix, each output channel with its own scale.

    $$s_i = \max_j |W_{ij}| / h, \qquad Q_{ij} = \mathrm{round}(\mathrm{clip}(W_{ij} / s_i, q_{min}, q_{max}))$$

    Where $h$ is half the width of the code range; a channel of zeros gets the smallest step of its dtype as scale.
    All arithmetic is in the weight's own dtype, as in llm-compressor: quantize float32 master weights where there are
    any, because in bfloat16 the quotient itself is rounded (to 0.5 near 127) before it becomes a code.

    Args:
        weight: Full-precision weight, shape (out, in), any floating dtype. Not modified.
        scheme: Target format.

    Returns:
        Codes (out, in) in `scheme.dtype` and scales (out, 1) in the weight's dtype; the weight is about codes *
        scales.

    Raises:
        ValueError: If the weight is not a floating-point matrix.
    """
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(
            f"Expected a floating-point weight of shape (out, in), got {weight.dtype} of shape {tuple(weight.shape)}: "
            "add the layer to quantization_ignore to keep it as it is."
        )
    codes = torch.empty_like(weight, dtype=scheme.dtype)
    scale = weight.new_empty(weight.shape[0], 1)
    # Channels are independent. On CPU a few at a time stay in cache between the passes over them.
    channels = weight.shape[0] if weight.is_cuda else max(1, CACHED_ELEMENTS // max(1, weight.shape[1]))
    for first in range(0, weight.shape[0], channels):
        chunk = slice(first, first + channels)
        _round_channels(weight[chunk], scheme, codes[chunk], scale[chunk])
    return codes, scale


def _round_channels(
    weight: torch.Tensor, scheme: QuantizationScheme, codes: torch.Tensor, scale: torch.Tensor
) -> None:
    """Round some channels, weight (n, in), into codes (n, in) and scale (n, 1)."""
    # Two reductions instead of abs().amax(): no temporary of the weight's size.
    absmax = torch.maximum(weight.amax(dim=1, keepdim=True), weight.amin(dim=1, keepdim=True).neg())  # (n, 1)
    torch.div(absmax, scheme.half_range, out=scale)
    scale.masked_fill_(scale == 0, torch.finfo(scale.dtype).eps)
    quotient = (weight / scale).clamp_(scheme.code_min, scheme.code_max)  # (n, in)
    codes.copy_(quotient.round_() if scheme.rounds else quotient)


def quantized_metadata(
    named_tensors: NamedTensors, scheme: QuantizationScheme, layers: Collection[str]
) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
    """
    Name, dtype and shape of everything that `quantize_weights` would yield, without rounding anything.

    Args:
        named_tensors: Parameters under their checkpoint names.
        scheme: Target format.
        layers: Names of the layers to quantize.
    """
    for name, tensor in named_tensors:
        if name.endswith(".weight") and name.removesuffix(".weight") in layers:
            yield name, scheme.dtype, tensor.shape
            yield f"{name}_scale", tensor.dtype, torch.Size((tensor.shape[0], 1))
        else:
            yield name, tensor.dtype, tensor.shape


def dequantize_weight(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The weight that codes and scales stand for.

        W = scale · codes

    Args:
        codes: `(out, in)`.
        scale: `(out, 1)`, one for each output channel.

    Returns:
        W, `(out, in)`, in the scales' dtype.
    """
    return codes.to(scale.dtype) * scale


def quantize_weights(
    named_tensors: NamedTensors,
    scheme: QuantizationScheme,
    layers: Collection[str],
    observer: Observer | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """
    Turn a stream of parameters into the tensors of a quantized checkpoint.

    `<layer>.weight` becomes `<layer>.weight` (codes) followed by `<layer>.weight_scale`; every other tensor passes
    through unchanged, as the very same object. The input is never modified.

    Args:
        named_tensors: Parameters under their checkpoint names.
        scheme: Target format.
        layers: Names of the layers to quantize, from `quantized_layer_names`.
        observer: Sees each quantized layer on its way, for measurements.

    Yields:
        `(name, tensor)` pairs in checkpoint format. Only the current layer's tensors are held.

    Raises:
        ValueError: After the last tensor, if a layer of `layers` never came: the engine would keep its old weights.
    """
    missing = set(layers)
    for name, tensor in named_tensors:
        layer = name.removesuffix(".weight")
        if layer == name or layer not in missing:
            yield name, tensor
            continue
        missing.remove(layer)
        codes, scale = quantize_weight(tensor, scheme)
        if observer is not None:
            observer(layer, tensor, codes, scale)
        yield name, codes
        yield f"{name}_scale", scale
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(layers)} layers to quantize were not among the tensors given, first "
            f"{min(missing)!r}: pass the names that quantized_layer_names() returns for the same model."
        )
