"""Tensors over NCCL, from the trainer to a server's workers: one broadcast for each.

The sender has a thread and a CUDA stream of its own, because a broadcast to a dead worker only ends
by an abort. The caller's thread makes the tensors: gathering a parameter is a collective operation,
which every process must start in the same order and on the same stream. So a tensor is handed over
only after the stream that made it has finished, and the thread keeps it until it has been sent.
"""

import queue
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

import torch

from trl_qurl.quantization.checkpoint_form import NamedTensors
from trl_qurl.rollout.background import in_background
from trl_qurl.rollout.errors import SyncError
from trl_qurl.rollout.wire import TensorMetadata


class Broadcast:
    """One stream of tensors in progress on a separate thread, to which `send` hands all of them."""

    def __init__(self, communicator: Any) -> None:
        self._ready: queue.Queue[torch.Tensor | BaseException | None] = queue.Queue(maxsize=1)
        self._outcome = in_background(self._run, communicator)

    def _run(self, communicator: Any) -> None:
        stream = torch.cuda.Stream()
        while True:
            item = self._ready.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            communicator.broadcast(item, src=0, stream=stream)
            stream.synchronize()  # then the next tensor may take its memory

    def send(self, named_tensors: NamedTensors, request: Future) -> None:
        """Hand over all tensors. Raises the error of the workers' `request` if it ends early."""
        try:
            for _, tensor in named_tensors:
                data = _as_bytes(tensor.detach().contiguous())
                if torch.accelerator.is_available():
                    torch.accelerator.current_stream().synchronize()
                self._put(data, request)
            self._put(None, request)
        except BaseException as error:
            # full if the thread waits inside NCCL, until that is aborted
            with suppress(queue.Empty):
                self._ready.get_nowait()
            self._ready.put(error)
            raise

    def _put(self, item: torch.Tensor | None, request: Future) -> None:
        while True:
            if self._outcome.done():
                self._outcome.result()
            if request.done():
                request.result()
                if item is not None:  # the workers may be faster than the word that this is all
                    raise SyncError(
                        "The server's workers stopped receiving before the last tensor was sent."
                    )
            with suppress(queue.Full):
                return self._ready.put(item, timeout=0.1)

    def wait(self, seconds: float) -> bool:
        """Wait for the thread this many seconds, and return whether it has ended."""
        return bool(wait([self._outcome], seconds).done)


def received(metadata: TensorMetadata, communicator: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of one `Broadcast` in a worker, each as soon as it has arrived."""
    for name, dtype, shape in metadata:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=communicator.device)
        communicator.broadcast(_as_bytes(tensor), src=0)
        yield name, tensor


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory, because NCCL does not know every dtype of a format."""
    return tensor.view(-1).view(torch.uint8)
