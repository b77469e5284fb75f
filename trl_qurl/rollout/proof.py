"""Evidence that a sync took effect: what was sent against what arrived, and what the engine says about a probe.

The field's worst bugs are silent: an engine that samples from stale or half-loaded weights. Two checks that share no
code say that this one does not. *Digests* compare every tensor as it left the trainer with the tensor as it entered
the engine. The *probe* compares the engine's log-probabilities with those of the trainer's own quantized forward pass,
so it also sees what happens behind the door: a kernel that dropped a scale, a cache that outlived its weights.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping

import torch


class SyncError(RuntimeError):
    """The engine does not hold the weights that were sent to it; training must not go on."""


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
    """

    def __init__(self, named_tensors: Iterable[tuple[str, torch.Tensor]], enabled: bool = True) -> None:
        self._named_tensors = named_tensors
        self._enabled = enabled
        self.digests: dict[str, str] = {}
        self.exhausted = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._named_tensors:
            if self._enabled:
                self.digests[name] = tensor_digest(tensor)
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


def compare_probe(engine: torch.Tensor, policy: torch.Tensor, policy_rounded: torch.Tensor) -> float:
    r"""
    Compare the engine's log-probabilities of a probe with the trainer's own quantized forward pass.

    The engine computes in its own dtype, in its own order, so they are never equal. How much of a difference rounding
    makes for these weights and this probe is measured: the trainer runs the pass twice, in float32 and in the engine's
    dtype. The engine's rounding errors have the size of the second pass's, in another order, so

    $$\max|\ell_{engine} - \ell_{32}| \le 4 \max|\ell_{dtype} - \ell_{32}| + 0.02$$

    Where 4 leaves room for the largest of many errors to fall elsewhere, and 0.02 nats for passes that round alike.

    Args:
        engine: Log-probabilities from the engine, any shape.
        policy: The same from the trainer, in float32.
        policy_rounded: The same from the trainer, in the engine's dtype.

    Returns:
        The largest difference, nats.

    Raises:
        SyncError: The difference exceeds the tolerance, or is not finite.
    """
    difference = (engine.double() - policy.double()).abs().max().item()
    tolerance = 4 * (policy_rounded.double() - policy.double()).abs().max().item() + 0.02
    if not difference <= tolerance:
        raise SyncError(
            f"The engine's log-probabilities of the probe differ from the policy's own quantized forward pass by "
            f"{difference:.3g} nats, where rounding explains {tolerance:.3g}: it does not compute with the weights "
            "that were sent, or keeps a cache from older ones. Training has stopped; resume from the last checkpoint."
        )
    return difference
