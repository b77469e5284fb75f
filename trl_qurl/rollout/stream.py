"""The weights on their way to the engine: what is announced, what is sent, and how long making it takes."""

import time
from collections.abc import Callable, Collection, Iterator

import torch

from trl_qurl.quantization.schemes import QuantizationScheme
from trl_qurl.quantization.stream import NamedTensors, stored_tensors
from trl_qurl.rollout.errors import SyncError

TensorMetadata = list[tuple[str, str, list[int]]]
"""Name, dtype (as vLLM writes it, `"bfloat16"`) and shape of each tensor of a stream, in its order."""


def announce(
    named_tensors: NamedTensors,
    scheme: QuantizationScheme | None,
    layers: Collection[str],
    dtype: torch.dtype | None = None,
) -> dict[str, TensorMetadata]:
    """
    What `quantize_weights` will yield for each parameter, by the parameter's name, without rounding anything.

    Args:
        named_tensors: Parameters under their checkpoint names.
        scheme: Format of the layers; `None` if they are not quantized.
        layers: Names of the layers that are quantized.
        dtype: What tensors that are not quantized are sent as; `None` for their own.
    """
    return {
        name: [
            (stored.name, _dtype_name(stored.dtype), list(stored.shape))
            for stored in stored_tensors(name, tensor, scheme, layers, dtype)
        ]
        for name, tensor in named_tensors
    }


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
