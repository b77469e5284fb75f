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
    named_tensors: NamedTensors, scheme: QuantizationScheme | None, layers: Collection[str], observer: Observer
) -> Iterator[tuple[str, torch.Tensor]]:
    """
    What is sent to the engine, made from the policy's parameters.

    Args:
        named_tensors: Parameters under their checkpoint names.
        scheme: Format of the layers; `None` sends them as they are.
        layers: Names of the linear layers that are quantized, or would be.
        observer: Sees each of those layers on its way.
    """
    if scheme is not None:
        yield from quantize_weights(named_tensors, scheme, layers, observer)
        return
    for name, tensor in named_tensors:
        layer = name.removesuffix(".weight")
        if layer in layers and layer != name:
            observer(layer, tensor, None, None)
        yield name, tensor


def announce(
    named_tensors: NamedTensors, scheme: QuantizationScheme | None, layers: Collection[str]
) -> TensorMetadata:
    """What `rollout_tensors` will yield for the same parameters, without making it."""
    if scheme is not None:
        entries = list(quantized_metadata(named_tensors, scheme, layers))
    else:
        entries = [(name, tensor.dtype, tensor.shape) for name, tensor in named_tensors]
    return [(name, _dtype_name(dtype), list(shape)) for name, dtype, shape in entries]


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


def timed(named_tensors: NamedTensors, record: Callable[[float], None]) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream; `record` is called with the seconds that each tensor took to make."""
    iterator = iter(named_tensors)
    while True:
        started = time.perf_counter()
        item = next(iterator, None)
        record(time.perf_counter() - started)
        if item is None:
            return
        yield item


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
