"""Check tensors at both ends of their way to an engine.

The worst bugs in this field are silent: an engine that samples from stale or half-loaded weights.
For files and servers, digests compare each tensor as it left the trainer with the tensor that
arrived. What happens afterward shows in the next rollout (`trainers/checks/guard.py`).
"""

import functools
import hashlib
import time
from collections.abc import Iterator, Mapping
from zlib import crc32

import torch
from torch import nn

from trl_qurl.quantization.checkpoint_form import NamedTensors
from trl_qurl.rollout.errors import SyncError
from trl_qurl.rollout.wire import NOT_RECEIVED

# By bytes of an element.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WORD = 8  # bytes
PIECE = 2**20  # elements that are widened to words at a time
# Words that a CPU adds up at a time, and a GPU 32 times as many: they stay in the cache.
WORDS = 2**16


def find_not_finite(
    named_tensors: NamedTensors, names: list[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass tensors of a checkpoint through, and add to `names` each one with NaN or infinity.

    Names are added after the last tensor: the stream does not stop at one, because a server's
    workers would wait for the rest forever. Codes are not read: a quantized weight shows both in
    its scale.
    """
    extremes: dict[str, torch.Tensor] = {}  # (2,)
    for name, tensor in named_tensors:
        values = tensor.detach()
        if name.endswith(".weight_scale") and values.dtype is torch.uint8:
            values = values.view(torch.float8_e8m0fnu).float()  # exponents
        if values.is_floating_point() and values.itemsize > 1 and values.numel():
            extremes[name] = torch.stack(values.aminmax()).float()
        yield name, tensor
    if not extremes:
        return
    all_extremes = _on_one_device(list(extremes.values()))  # (tensors, 2)
    are_finite = all_extremes.isfinite().all(1).tolist()  # one wait for all
    for name, is_finite in zip(extremes, are_finite, strict=True):
        if not is_finite:
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
    return _read([_digest(tensor)])[0]


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bits, read as integers, modulo 2^64, without a copy.

    It is a scalar on the tensor's device. It costs a seventh of a digest and is as exact: one
    changed bit changes it. But it does not see the order, and two changes may cancel.
    """
    integers = as_integers(tensor)
    by_stride = sorted(range(integers.dim()), key=integers.stride, reverse=True)
    integers = integers.permute(by_stride)  # a transposed matrix is contiguous in the other order
    if not integers.is_contiguous():
        rows = max(1, PIECE // integers[0].numel())
        return torch.stack([part.sum(dtype=torch.int64) for part in integers.split(rows)]).sum()
    # Whole words in the middle, which need no widening, and single elements before and after them.
    flat = integers.view(-1)
    per_word = WORD // integers.itemsize
    start = -flat.storage_offset() % per_word
    end = start + (len(flat) - start) // per_word * per_word
    if end <= start:
        return flat.sum(dtype=torch.int64)
    before = flat[:start].sum(dtype=torch.int64)
    after = flat[end:].sum(dtype=torch.int64)
    return flat[start:end].view(torch.int64).sum() + before + after


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as signed integers with the same bits, without a copy."""
    return tensor.detach().view(INTEGERS[tensor.itemsize])


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the digest's two numbers, (2,), on the tensor's device, without waiting for it.

    Words of 64 bits are multiplied by odd constants and added, all modulo 2^64: exact, so the order
    does not matter. One changed bit always changes the first sum. Two highest bits (signs) would
    cancel, so the second sum is that of the words' upper halves.
    """
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    if len(data) % 8 or data.storage_offset() % 8:
        data = nn.functional.pad(data, (0, -len(data) % 8))
    words = data.view(torch.int64)
    table, order = _constants(words.device)
    rows_at_a_time = 1 if words.device.type == "cpu" else 32
    end = len(words) // WORDS * WORDS
    parts = [*words[:end].view(-1, WORDS).split(rows_at_a_time)]
    parts.append(words[None, end:])
    whole_words = []  # sums of each row
    upper_halves = []
    buffer = torch.empty_like(parts[0])
    for rows in parts:
        width = rows.shape[1]
        factors = table[:width]
        products = buffer[: len(rows), :width]
        torch.mul(rows, factors, out=products)
        whole_words.append(products.sum(1))
        torch.bitwise_right_shift(rows, 32, out=products)
        upper_halves.append(products.mul_(factors).sum(1))
    sums = torch.stack([torch.cat(whole_words), torch.cat(upper_halves)])  # (2, rows)
    kind = crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    return (sums * order[: sums.shape[1]]).sum(1) + kind


@functools.cache
def _constants(device: torch.device) -> torch.Tensor:
    """Return odd numbers to multiply words with, and sums of words, (2, `WORDS`)."""
    random = bytearray(hashlib.shake_128().digest(16 * WORDS))
    return (torch.frombuffer(random, dtype=torch.int64) | 1).view(2, WORDS).to(device)


def _read(digests: list[torch.Tensor]) -> list[str]:
    """Read all digests, with one wait for their device."""
    return [str(numbers) for numbers in _on_one_device(digests).tolist()]


def _on_one_device(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Stack tensors of the same shape, on the device of the first."""
    device = tensors[0].device
    return torch.stack([tensor.to(device) for tensor in tensors])


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
        digests: dict[str, torch.Tensor] = {}
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
                digests[name] = _digest(tensor)
                self.digest_s += time.perf_counter() - started
            yield name, tensor
        if self.digests is not None and digests:
            started = time.perf_counter()
            self.digests |= zip(digests, _read(list(digests.values())), strict=True)
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
