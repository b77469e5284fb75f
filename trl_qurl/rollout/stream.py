"""The weights on their way to the engine: what they will be, what they are, and how long making them takes."""

import time
from collections.abc import Callable, Collection, Iterator

import torch

from trl_qurl.quantization.schemes import QuantizationScheme
from trl_qurl.quantization.weights import NamedTensors, quantize_weights, quantized_metadata
from trl_qurl.rollout.errors import SyncError

TensorMetadata = list[tuple[str, str, list[int]]]
"""Name, dtype (as vLLM writes it, `"bfloat16"`) and shape of each tensor of a stream, in its order."""

Observer = Callable[[str, torch.Tensor, torch.Tensor | None, torch.Tensor | None], None]
"""Called with a layer's name and weight, and its codes and scale where it is quantized."""


def rollout_tensors(
    named_tensors: NamedTensors,
    scheme: QuantizationScheme | None,
    layers: Collection[str],
    observer: Observer,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """
    What is sent to the engine, made from the policy's parameters.

    Args:
        named_tensors: Parameters under their checkpoint names.
        scheme: Format of the layers; `None` sends them as they are.
        layers: Names of the linear layers that are quantized, or would be.
        observer: Sees each of those layers on its way.
        dtype: What tensors that are not quantized become; `None` leaves them as they are. An engine casts them to its
            own as it loads them, to the same bits, so this only saves bytes on the way.
    """
    if scheme is not None:
        quantized = {f"{layer}.weight" for layer in layers}
        quantized |= {f"{name}_scale" for name in quantized}
        for name, tensor in quantize_weights(named_tensors, scheme, layers, observer):
            yield name, tensor if name in quantized else tensor.to(sent_dtype(tensor.dtype, dtype))
        return
    for name, tensor in named_tensors:
        layer = name.removesuffix(".weight")
        if layer in layers and layer != name:
            observer(layer, tensor, None, None)
        yield name, tensor.to(sent_dtype(tensor.dtype, dtype))


def sent_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """What a tensor that is not quantized is sent as."""
    return own if wanted is None or not own.is_floating_point else wanted


def announce(
    named_tensors: NamedTensors,
    scheme: QuantizationScheme | None,
    layers: Collection[str],
    dtype: torch.dtype | None = None,
) -> TensorMetadata:
    """What `rollout_tensors` will yield for the same parameters, without making it."""
    if scheme is not None:
        entries = list(quantized_metadata(named_tensors, scheme, layers))
        quantized = {f"{layer}.weight" for layer in layers}
        quantized |= {f"{name}_scale" for name in quantized}
    else:
        entries = [(name, tensor.dtype, tensor.shape) for name, tensor in named_tensors]
        quantized = set()
    return [
        (name, _dtype_name(own if name in quantized else sent_dtype(own, dtype)), list(shape))
        for name, own, shape in entries
    ]


def as_announced(
    named_tensors: NamedTensors, metadata: TensorMetadata, refused: Callable[[], bool]
) -> Iterator[tuple[str, torch.Tensor]]:
    """
    The stream, as long as each tensor is the announced one: the far end cuts it up by what was announced.

    Args:
        named_tensors: What is sent.
        metadata: What was announced.
        refused: Says whether the far end has stopped receiving.

    Raises:
        SyncError: At the first tensor that differs, or if the far end has stopped receiving.
    """
    sent = 0
    for name, tensor in named_tensors:
        found = (name, _dtype_name(tensor.dtype), list(tensor.shape))
        if sent >= len(metadata) or found != metadata[sent]:
            announced = metadata[sent] if sent < len(metadata) else "nothing"
            raise SyncError(f"Tensor {sent} of the stream is {found}, where {announced} was announced.")
        if refused():
            raise SyncError("The server's workers answered before the last tensor was sent.")
        sent += 1
        yield name, tensor
    if sent < len(metadata):
        raise SyncError(f"The stream ended after {sent} tensors, where {len(metadata)} were announced.")


def timed(named_tensors: NamedTensors, record: Callable[[float, int], None]) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream; `record` is called with the seconds that each tensor took to make, and its bytes."""
    iterator = iter(named_tensors)
    while True:
        started = time.perf_counter()
        item = next(iterator, None)
        record(time.perf_counter() - started, 0 if item is None else item[1].nbytes)
        if item is None:
            return
        yield item


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
