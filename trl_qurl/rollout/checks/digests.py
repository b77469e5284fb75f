"""Evidence that a sync took effect: what was sent against what arrived.

The field's worst bugs are silent: an engine that samples from stale or half-loaded weights. Two checks that share no
code say that this one does not. *Digests*, here, compare every tensor as it left the trainer with the tensor as it
entered the engine. The *probe* (`probe`) compares the engine's log-probabilities with those of the trainer's own
quantized forward pass, so it also sees what happens behind the door: a kernel that dropped a scale, a cache that
outlived its weights.
"""

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping

import torch

from trl_qurl.rollout.errors import SyncError


def tensor_digest(tensor: torch.Tensor) -> str:
    """Digest of a tensor's dtype, shape and bytes, the same on every device and in every process."""
    data = tensor.detach().to("cpu").contiguous()
    digest = hashlib.blake2b(f"{data.dtype}{tuple(data.shape)}".encode(), digest_size=16)
    if data.numel():
        digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class DigestRecorder:
    """
    A stream of named tensors that remembers the digest of each one that passed.

    Args:
        named_tensors: The stream.
        enabled: `False` lets it pass unread.

    Attributes:
        digests: Name to digest, of what has passed.
        seconds: Spent on them.
        exhausted: Whether the stream was read to its end.
    """

    def __init__(self, named_tensors: Iterable[tuple[str, torch.Tensor]], enabled: bool = True) -> None:
        self._named_tensors = named_tensors
        self._enabled = enabled
        self.digests: dict[str, str] = {}
        self.seconds = 0.0
        self.exhausted = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._named_tensors:
            if self._enabled:
                started = time.perf_counter()
                self.digests[name] = tensor_digest(tensor)
                self.seconds += time.perf_counter() - started
            yield name, tensor
        self.exhausted = True


def compare_digests(sent: Mapping[str, str], received: Mapping[str, str]) -> None:
    """
    Make sure that what arrived is what was sent, tensor by tensor.

    Raises:
        SyncError: Names the tensors that are missing, unexpected or different.
    """
    faults = {
        "missing": sorted(sent.keys() - received.keys()),
        "unexpected": sorted(received.keys() - sent.keys()),
        "different": sorted(name for name in sent.keys() & received.keys() if sent[name] != received[name]),
    }
    found = [f"{len(names)} {fault} (first {names[0]})" for fault, names in faults.items() if names]
    if found:
        raise SyncError(
            f"The engine did not receive the weights that were sent: of {len(sent)} tensors, {', '.join(found)}. "
            "Training has stopped before sampling from them; resume from the last checkpoint."
        )
