"""Check tensors at both ends of their way to an engine.

The worst bugs in this field are silent: an engine that samples from stale or half-loaded weights.
For files and servers, digests compare each tensor as it left the trainer with the tensor that
arrived. What happens afterward shows in the next rollout (`trainers/checks/guard.py`).
"""

import hashlib
import time
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import NamedTuple

import torch

from trl_qurl.quantization.checkpoint_form import NamedTensors
from trl_qurl.rollout.errors import SyncError
from trl_qurl.rollout.wire import NOT_RECEIVED

# By bytes of an element.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WORD = 8  # bytes


def find_not_finite(
    named_tensors: NamedTensors, names: list[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass tensors of a checkpoint through, and add to `names` each one with NaN or infinity.

    Names are added after the last tensor: the stream does not stop at one, because a server's
    workers would wait for the rest forever. Codes are not read: a quantized weight shows both in
    its scale. A scale per channel is kept until then, to be read with all others at once.
    """
    read: dict[str, tuple[torch.Tensor, ...]] = {}  # least and largest value, or all
    for name, tensor in named_tensors:
        values = tensor.detach()
        if values.is_floating_point() and values.itemsize > 1 and values.numel():
            is_short = values.shape[-1:] == (1,)  # a scale per channel
            read[name] = (values,) if is_short else values.aminmax()
        yield name, tensor
    if not read:
        return
    numbers = [each.flatten().to(values.device) for each in chain.from_iterable(read.values())]
    are_finite = torch.cat(numbers).isfinite().cpu()  # one wait for all
    lengths = [sum(map(torch.numel, parts)) for parts in read.values()]
    for name, part in zip(read, are_finite.split(lengths), strict=True):
        if not part.all():
            names.append(name.removesuffix("_scale"))


def require_finite(names: list[str]) -> None:
    """Raise `SyncError` if `find_not_finite` found a tensor."""
    if names:
        raise SyncError(
            f"{names[0]} holds NaN or infinity: training has diverged, and an engine would "
            "generate noise. Resume from the last checkpoint before `grad_norm` grew, with a lower "
            "learning rate."
        )


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's dtype, shape, and bytes, the same wherever it is computed."""
    return read_digests({"": sum_words(tensor)})[""]


class WordSums(NamedTuple):
    """What a digest is made of: reductions of a tensor's words, on its device, not waited for.

    Sums are modulo 2^64. A change of up to three words changes one, and so does every exchange of
    two. Two highest bits (signs) would cancel, but the largest word shows signs that all change.
    """

    kind: str  # dtype and shape
    parts: list[torch.Tensor]  # sums of columns, sums of rows, and the largest word of each row


def sum_words(tensor: torch.Tensor) -> WordSums:
    """Return the sums of a tensor. On a GPU, that is three launches."""
    words = as_words(tensor)
    parts = [words.sum(0), words.sum(1)]
    has_whole_words = words.numel() < tensor.numel() or tensor.itemsize == WORD
    if has_whole_words and words.numel():  # in those that are widened, nothing cancels
        parts.append(words.amax(1))
    return WordSums(f"{tensor.dtype}{tuple(tensor.shape)}", parts)


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as a matrix of integers, (rows, words), wherever the tensor lies.

    A row is one of the last dimension, and a word the bits of several elements. Rows that are no
    whole words are widened instead: each element is a word.
    """
    data = tensor.detach().contiguous()
    matrix = data.flatten(0, -2) if data.dim() > 1 else data.view(1, -1)
    matrix = matrix.view(INTEGERS[tensor.itemsize])
    per_word = WORD // tensor.itemsize
    if matrix.shape[1] % per_word or not matrix.numel():
        return matrix.to(torch.int64)
    if matrix.storage_offset() % per_word or matrix.stride(0) % per_word:
        matrix = matrix.clone(memory_format=torch.contiguous_format)  # to where words begin
    return matrix.view(torch.int64)


def read_digests(sums: Mapping[str, WordSums]) -> dict[str, str]:
    """Return the digests of tensors by name, with one wait for their device."""
    if not sums:
        return {}
    parts = list(chain.from_iterable(each.parts for each in sums.values()))
    device = parts[0].device
    values = torch.cat([part.to(device) for part in parts]).cpu()
    unread = iter(values.split([len(part) for part in parts]))
    digests = {}
    for name, each in sums.items():
        digest = hashlib.blake2b(each.kind.encode(), digest_size=16)
        for part in islice(unread, len(each.parts)):
            digest.update(part.numpy())
        digests[name] = digest.hexdigest()
    return digests


def base_digests(named_tensors: NamedTensors, dtype: torch.dtype) -> dict[str, str]:
    """Return digests of a checkpoint's tensors as an engine of this dtype holds them.

    Codes are not cast.
    """
    digests = {}
    for name, tensor in named_tensors:
        if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16):
            tensor = tensor.to(dtype)
        digests[name] = tensor_digest(tensor)
    return digests


class MeteredStream:
    """A stream of named tensors that counts its bytes and seconds.

    It adds digests, by name, to `digests`, if given.
    """

    def __init__(self, named_tensors: NamedTensors, digests: dict[str, str] | None) -> None:
        self._named_tensors = iter(named_tensors)
        self.digests = digests
        self.nbytes = 0
        self.source_s = 0.0  # spent on making the tensors
        self.digest_s = 0.0  # spent on digests

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        sums: dict[str, WordSums] = {}
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
                sums[name] = sum_words(tensor)
                self.digest_s += time.perf_counter() - started
            yield name, tensor
        if self.digests is not None:
            started = time.perf_counter()
            self.digests |= read_digests(sums)
            self.digest_s += time.perf_counter() - started


def compare_digests(sent: Mapping[str, str], received: Mapping[str, str]) -> None:
    """Raise `SyncError` with the missing, unexpected, and different tensors, if there are any."""
    clause = differences(sent, received)
    if clause:
        raise SyncError(f"{NOT_RECEIVED}: {clause}. Resume from the last checkpoint.")


def differences(sent: Mapping[str, str], received: Mapping[str, str]) -> str:
    """Describe the missing, unexpected, and different tensors, in a clause.

    It is empty if there are none.
    """
    common = sent.keys() & received.keys()
    faults = {
        "missing": sent.keys() - received.keys(),
        "unexpected": received.keys() - sent.keys(),
        "different": {name for name in common if sent[name] != received[name]},
    }
    parts = []
    for fault, names in faults.items():
        if names:
            parts.append(f"{len(names)} {fault} (first {min(names)})")
    if not parts:
        return ""
    return f"of {len(sent)} tensors, {', '.join(parts)}"
