"""A stand-in for NCCL between a trainer and a worker in two threads of one process."""

import queue
from types import SimpleNamespace

import torch


class HandedOver:
    """vLLM's process group between two threads of one process."""

    def __init__(self):
        self.tensors = queue.Queue()

    def sender(self):
        def broadcast(tensor, src, stream):
            assert tensor.dtype == torch.uint8 and tensor.is_contiguous()
            self.tensors.put(tensor.clone())

        return SimpleNamespace(broadcast=broadcast)

    def receiver(self):
        def broadcast(tensor, src):
            tensor.copy_(self.tensors.get(timeout=20))

        return SimpleNamespace(broadcast=broadcast, device=torch.device("cpu"))


class NoStream:
    """In place of a CUDA stream."""

    def synchronize(self):
        pass
