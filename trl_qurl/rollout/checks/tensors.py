"""Check tensors at both ends of their way to an engine.

The worst bugs in this field are silent: an engine that samples from stale or half-loaded weights. Digests compare each
tensor as it left the trainer with the tensor as it entered the engine, and `ReceivedTensors` compares the latter with
the values that layers hold afterward. Kernels may repack the weights of a layer that multiplies, even within the same
shape, so this second check covers only the other layers: norms, and the embedding (except for rows that the engine
adds to the vocabulary). The probe (`probe`) shares no code with these checks and covers the rest.
"""

import hashlib
import math
import time
from collections.abc import Iterator, Mapping
from itertools import zip_longest

import torch

from trl_qurl.quantization.checkpoint_form import NamedTensors
from trl_qurl.rollout.engine.interface import NOT_RECEIVED, TensorMetadata
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
    """A stream of named tensors that counts its bytes and seconds, and records digests if `records_digests`."""

    def __init__(self, named_tensors: NamedTensors, records_digests: bool = True) -> None:
        self._named_tensors = iter(named_tensors)
        self._records_digests = records_digests
        self.digests: dict[str, str] = {}  # by name
        self.nbytes = 0
        self.source_s = 0.0  # spent on making the tensors
        self.digest_s = 0.0  # spent on digests
        self.exhausted = False  # whether the stream was read to its end

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            started = time.perf_counter()
            item = next(self._named_tensors, None)
            self.source_s += time.perf_counter() - started
            if item is None:
                break
            name, tensor = item
            self.nbytes += tensor.nbytes
            if self._records_digests:
                started = time.perf_counter()
                self.digests[name] = tensor_digest(tensor)
                self.digest_s += time.perf_counter() - started
            yield name, tensor
        self.exhausted = True


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


def check_metadata(named_tensors: NamedTensors, metadata: TensorMetadata) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass the stream through; raise `SyncError` at a tensor that differs from the metadata sent to the workers."""
    for index, (item, expected) in enumerate(zip_longest(named_tensors, metadata)):
        actual = item and (item[0], str(item[1].dtype).removeprefix("torch."), list(item[1].shape))
        if actual != expected:
            raise SyncError(f"Tensor {index} of the stream is {actual}, but its metadata says {expected}.")
        yield item


class ReceivedTensors:
    """Records digests of the tensors loaded into a model, if `enabled`, and compares them with what it then holds."""

    def __init__(self, model: torch.nn.Module, enabled: bool = True) -> None:
        self._model = model
        self._enabled = enabled
        self._dtypes = {name: parameter.dtype for name, parameter in self._comparable().items()}
        self.digests: dict[str, str] = {}  # by name, over all watched streams
        self._expected: dict[str, tuple[torch.Size, str]] = {}

    def watch(self, named_tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass tensors through, and record their digests."""
        for name, tensor in named_tensors:
            if self._enabled:
                self.digests[name] = tensor_digest(tensor)
                if name in self._dtypes:
                    self._expected[name] = tensor.shape, tensor_digest(tensor.to(self._dtypes[name]))
            yield name, tensor

    def compare(self) -> list[str]:
        """Return the names of comparable parameters; raise `RuntimeError` if one does not hold the received values."""
        parameters = self._comparable()
        comparable, differing = [], []
        for name, (shape, digest) in self._expected.items():
            value = padding = parameters[name]
            if shape and value.dim():
                value, padding = value[: shape[0]], value[shape[0] :]  # an embedding may have extra rows of zeros
            if value.shape == shape:
                comparable.append(name)
                if tensor_digest(value) != digest or (value is not padding and padding.count_nonzero()):
                    differing.append(name)
        if differing:
            raise RuntimeError(
                f"The engine received the right weights, but {len(differing)} of the {len(comparable)} parameters "
                f"that can be compared do not hold them, first {differing[0]}: the engine's loader changed them. "
                "Open an issue with the model's name and the output of `trl-qurl doctor --json`, and try "
                "rollout_quantization=None."
            )
        return comparable

    def _comparable(self) -> dict[str, torch.Tensor]:
        """Return, by name, the parameters that vLLM does not repack: those in layers that do not multiply."""
        return {
            f"{layer}.{name}": parameter
            for layer, module in self._model.named_modules()
            if not hasattr(module, "quant_method") or type(module).__name__ == "VocabParallelEmbedding"
            for name, parameter in module.named_parameters(recurse=False)
        }
