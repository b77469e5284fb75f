"""Check tensors at both ends of their way to an engine.

The worst bugs in this field are silent: an engine that samples from stale or half-loaded weights. Digests compare each
tensor as it left the trainer with the tensor as it entered the engine. The probe (`probe`) shares no code with this
check and covers what happens afterward.
"""

import hashlib
import math
import time
from collections.abc import Iterator, Mapping

import torch

from trl_qurl.quantization.checkpoint_form import NamedTensors
from trl_qurl.rollout.engine.interface import NOT_RECEIVED
from trl_qurl.rollout.errors import SyncError


def find_not_finite(named_tensors: NamedTensors, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass tensors through, and add to `names` each one that contains NaN or infinity.

    The stream does not stop there, because a server's workers would wait for the rest forever.
    """
    for name, tensor in named_tensors:
        # A sum is one fast read. It can overflow, so it only selects the tensors to check element by element.
        is_suspect = tensor.is_floating_point() and not math.isfinite(tensor.detach().sum(dtype=torch.float32))
        if is_suspect and not tensor.isfinite().all():
            names.append(name)
        yield name, tensor


def require_finite(names: list[str]) -> None:
    """Raise `SyncError` if `find_not_finite` found a tensor."""
    if names:
        raise SyncError(
            f"{names[0]} holds NaN or infinity: training has diverged, and an engine would generate noise. Resume "
            "from the last checkpoint before `grad_norm` grew, with a lower learning rate."
        )


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's dtype, shape, and bytes, the same on every device and in every process."""
    data = tensor.detach().to("cpu").contiguous()
    digest = hashlib.blake2b(f"{data.dtype}{tuple(data.shape)}".encode(), digest_size=16)
    if data.numel():
        digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def base_digests(named_tensors: NamedTensors, dtype: torch.dtype) -> dict[str, str]:
    """Return digests of a checkpoint's tensors as an engine of this dtype holds them; codes are not cast."""
    sixteen_bits = (torch.float32, torch.bfloat16, torch.float16)
    return {name: tensor_digest(t.to(dtype) if t.dtype in sixteen_bits else t) for name, t in named_tensors}


class MeteredStream:
    """A stream of named tensors that counts its bytes and seconds, and adds digests by name to `digests`, if given."""

    def __init__(self, named_tensors: NamedTensors, digests: dict[str, str] | None) -> None:
        self._named_tensors = iter(named_tensors)
        self.digests = digests
        self.nbytes = 0
        self.source_s = 0.0  # spent on making the tensors
        self.digest_s = 0.0  # spent on digests

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            started = time.perf_counter()
            item = next(self._named_tensors, None)
            self.source_s += time.perf_counter() - started
            if item is None:
                break
            name, tensor = item
            self.nbytes += tensor.nbytes
            if self.digests is not None:
                started = time.perf_counter()
                self.digests[name] = tensor_digest(tensor)
                self.digest_s += time.perf_counter() - started
            yield name, tensor


def compare_digests(sent: Mapping[str, str], received: Mapping[str, str]) -> None:
    """Raise `SyncError` with the missing, unexpected, and different tensors, if there are any."""
    if clause := differences(sent, received):
        raise SyncError(f"{NOT_RECEIVED}: {clause}. Resume from the last checkpoint.")


def differences(sent: Mapping[str, str], received: Mapping[str, str]) -> str:
    """Describe the missing, unexpected, and different tensors in a clause for a message; empty if there are none."""
    faults = {
        "missing": sent.keys() - received.keys(),
        "unexpected": received.keys() - sent.keys(),
        "different": {name for name in sent.keys() & received.keys() if sent[name] != received[name]},
    }
    parts = [f"{len(names)} {fault} (first {min(names)})" for fault, names in faults.items() if names]
    return f"of {len(sent)} tensors, {', '.join(parts)}" if parts else ""
