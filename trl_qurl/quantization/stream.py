"""Full-precision tensors in, checkpoint-format tensors out, one at a time.

This is all the quantization that happens at each training step. It needs no calibration and keeps nothing, so memory
holds one layer at a time, plus the layers that share its scale. The scheme decides which tensors a weight becomes.
"""

from collections.abc import Collection, Iterable, Iterator

import torch

from trl_qurl.quantization.packing import StoredTensor
from trl_qurl.quantization.scheme import QuantizationScheme

NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""Parameters under their checkpoint names."""


def stored_tensors(
    name: str,
    tensor: torch.Tensor,
    scheme: QuantizationScheme | None,
    layers: Collection[str],
    dtype: torch.dtype | None = None,
) -> list[StoredTensor]:
    """Describe the tensors that `quantize_weights` would yield for one parameter."""
    shape = getattr(tensor, "ds_shape", tensor.shape)  # the full shape if ZeRO-3 shards it
    layer = _layer(name, layers)
    if scheme is None or layer is None:
        return [StoredTensor(name, _sent_dtype(tensor.dtype, dtype), shape)]
    return [entry._replace(name=f"{layer}.{entry.name}") for entry in scheme.layout(shape, tensor.dtype)]


def quantize_weights(
    named_tensors: NamedTensors,
    scheme: QuantizationScheme | None,
    layers: Collection[str],
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Convert a stream of parameters into the tensors of a quantized checkpoint.

    `<layer>.weight` becomes the tensors of the scheme's layout, each under the layer's name; every other tensor passes
    through. The input is not modified.

    Args:
        named_tensors: Parameters under their checkpoint names.
        scheme: Target format; `None` quantizes nothing.
        layers: Names of the layers to quantize, from `quantized_layer_names`.
        dtype: Floating-point type of the tensors that are not quantized; `None` leaves them as they are. An engine
            would cast them to the same bits, so this only saves bandwidth.

    Yields:
        `(name, tensor)` pairs in checkpoint format. Memory holds the tensors of one layer and its companions.

    Raises:
        ValueError: If the scheme cannot store a layer, or, after the last tensor, if a layer of `layers` is missing.
    """
    missing = set(layers)
    for name, tensor, companions in _with_companions(named_tensors, scheme, layers):
        layer = _layer(name, missing)
        if layer is not None:
            missing.remove(layer)
        if scheme is None or layer is None:
            yield name, tensor.to(_sent_dtype(tensor.dtype, dtype))
        else:
            tensors = scheme.quantize(tensor, companions)
            yield from ((f"{layer}.{suffix}", part) for suffix, part in tensors.items())
    if missing and scheme is not None:
        raise ValueError(
            f"{len(missing)} of {len(layers)} layers to quantize were not among the tensors, first "
            f"{min(missing)!r}: pass the names that quantized_layer_names() returns for the same model."
        )


def _with_companions(
    named_tensors: NamedTensors, scheme: QuantizationScheme | None, layers: Collection[str]
) -> Iterator[tuple[str, torch.Tensor, list[torch.Tensor]]]:
    """Yield each parameter with its companions' weights; buffers parameters until the last companion arrives."""
    buffered: list[tuple[str, torch.Tensor]] = []
    awaited: set[str] = set()

    def companions(name: str) -> list[str]:
        layer = _layer(name, layers)
        return [] if scheme is None or layer is None else [f"{x}.weight" for x in scheme.companions(layer, layers)]

    for name, tensor in named_tensors:
        if name in awaited:
            awaited.remove(name)
        else:
            awaited.update(companions(name))
        # ZeRO-3 releases a parameter when the next one is requested.
        buffered.append((name, tensor.clone() if awaited else tensor))
        if not awaited:
            weights = dict(buffered)
            yield from ((other, t, [weights[x] for x in companions(other)]) for other, t in buffered)
            buffered = []
    yield from ((name, tensor, []) for name, tensor in buffered)  # companions are missing; the caller raises


def _layer(name: str, layers: Collection[str]) -> str | None:
    """Return the layer of `layers` to which a weight of this name belongs."""
    layer = name.removesuffix(".weight")
    return layer if layer != name and layer in layers else None


def _sent_dtype(own: torch.dtype, target: torch.dtype | None) -> torch.dtype:
    return own if target is None or not own.is_floating_point else target
