"""What an engine's layers hold, and how it differs after a reload from a fresh start and from what
a graph reads.
"""

from typing import NamedTuple

import torch

FOLLOWED = ("vllm.model_executor", "vllm.v1.attention")
"""Modules with the classes of layers, methods, schemes, kernels and attention."""


class Held(NamedTuple):
    tensor: torch.Tensor
    is_buffer: bool  # vLLM's sleep mode saves these


def held_tensors(model):
    """
    All tensors by path: parameters, buffers, and others in attributes and containers of layers.

    This searches more places than the repair does, to notice tensors that the repair forgets.
    """
    found = {}
    seen = {id(module) for module in model.modules()}

    def look(path, value):
        if isinstance(value, torch.Tensor):
            if not path.endswith("_cpu"):  # on the host on a GPU machine too
                found.setdefault(path, Held(value, False))
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                look(f"{path}[{index}]", item)
        elif isinstance(value, dict):
            for name, item in value.items():
                look(f"{path}[{name}]", item)
        elif type(value).__module__.startswith(FOLLOWED) and id(value) not in seen:
            seen.add(id(value))
            for name, part in getattr(value, "__dict__", {}).items():
                look(f"{path}.{name}", part)

    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            found[name] = Held(parameter, False)
        for name, buffer in module.named_buffers(path, recurse=False):
            found[name] = Held(buffer, True)
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                look(f"{path}.{name}", value)
    return found


def capture(held):
    """Views of all tensors, for the addresses in a CUDA graph. A view also keeps the memory, unlike
    a graph.
    """
    return {path: tensor.detach().view_as(tensor) for path, (tensor, _) in held.items()}


def sleep(held):
    """Level 2: what was allocated while loading is lost, except for buffers, which vLLM saves and
    restores.
    """
    kept = {tensor.untyped_storage().data_ptr() for tensor, is_buffer in held.values() if is_buffer}
    for tensor, _ in held.values():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in kept and storage.nbytes():
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0x7F)  # no dtype's own value


def compare(now, fresh, captured):
    """
    Faults of an engine after its reloads, by kind; none if all is well.

    Args:
        now: What it holds.
        fresh: What an engine holds that started from the same weights.
        captured: What its CUDA graphs read.
    """
    owned = {tensor.untyped_storage().data_ptr() for tensor, _ in now.values()}
    both = now.keys() & fresh.keys()
    kept = {path for path in now if "_kept_for_graphs" in path}
    unlike = {path for path in both if not same(now[path].tensor, fresh[path].tensor)}
    freed = set()
    other = set()
    for path, tensor in captured.items():
        if tensor.numel() and tensor.untyped_storage().data_ptr() not in owned:
            freed.add(path)
        if path in both and not same(tensor, fresh[path].tensor):
            other.add(path)
    faults = {
        "only in one engine": (now.keys() ^ fresh.keys()) - kept,
        "unlike a fresh engine": unlike,
        "graphs read freed memory": freed,
        "graphs read other values": other,
    }
    return {kind: short(paths) for kind, paths in faults.items() if paths}


def same(one, other):
    """Compare layout, dtype and all bits."""
    if (one.shape, one.stride(), one.dtype) != (other.shape, other.stride(), other.dtype):
        return False
    return torch.equal(bits(one), bits(other))


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def short(paths):
    """Paths without the numbers of layers."""
    found = set()
    for path in paths:
        parts = [part for part in path.split(".") if not part.isdigit()]
        found.add(".".join(parts).removeprefix("model.layers."))
    return sorted(found)
