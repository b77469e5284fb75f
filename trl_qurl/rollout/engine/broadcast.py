"""Send tensors to a server's workers over NCCL, with vLLM's packed broadcast.

The broadcast runs on a separate thread and separate streams, because one to a dead worker only ends
by an abort. The caller's thread makes the tensors: gathering a parameter is a collective operation,
which every process must start in the same order and on the same stream. So a tensor is handed over
only after the stream that made it has finished, and its memory is not reused before the broadcast's
stream has read it.
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

Item = tuple[str, torch.Tensor]
# At both ends: vLLM's default of 1 GiB would not fit beside a full cache, and below 0.33 it does
# not order the streams of several buffers, so a layer may read one that is being filled again.
PACKING = {"buffer_size_bytes": 2**28, "num_buffers": 1}


class Broadcast:
    """One broadcast in progress on a separate thread, to which `send` hands all tensors."""

    def __init__(self, communicator: Any) -> None:
        self._ready: queue.Queue[Item | BaseException | None] = queue.Queue(maxsize=1)
        self._outcome = in_background(self._run, communicator)

    def _run(self, communicator: Any) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        tensors = self._queued_tensors()
        packed_nccl_broadcast_producer(
            tensors, communicator, src=0, post_iter_func=_keep_tensor, **PACKING
        )

    def _queued_tensors(self) -> Iterator[Item]:
        while (item := self._ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def send(self, named_tensors: NamedTensors, request: Future) -> None:
        """Hand over all tensors. If the workers' `request` to receive them ends early, raise its
        error.
        """
        try:
            for name, tensor in named_tensors:
                if torch.accelerator.is_available():
                    torch.accelerator.current_stream().synchronize()
                self._put((name, tensor), request)
            self._put(None, request)
        except BaseException as error:
            # full if the thread waits inside NCCL, until that is aborted
            with suppress(queue.Empty):
                self._ready.get_nowait()
            self._ready.put(error)
            raise

    def _put(self, item: Item | None, request: Future) -> None:
        while True:
            if self._outcome.done():
                self._outcome.result()
            if request.done():
                raise request.exception() or SyncError(
                    "The server's workers stopped receiving before the last tensor was sent."
                )
            with suppress(queue.Full):
                return self._ready.put(item, timeout=0.1)

    def wait(self, seconds: float) -> bool:
        """Wait for the thread this many seconds, and return whether it has ended."""
        return bool(wait([self._outcome], seconds).done)


def _keep_tensor(item: Item) -> torch.Tensor:
    """Return an item's tensor, whose memory is not reused before this stream has read it."""
    if torch.accelerator.is_available():
        item[1].record_stream(torch.accelerator.current_stream())
    return item[1]
