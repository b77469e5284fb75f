"""Tensors that a reload on a GPU moves (reports 6 and 8): Marlin's bias, and what kernels hold.

CUDA graphs read a tensor where it was at their capture. vLLM copies new weights to the old
addresses, but not these tensors, so without this repair the graphs read freed memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

REPORTS = (6, 8)
SEEN_IN = "vllm 0.32"
UNNECESSARY_FROM = None

LAYERS = "vllm.model_executor"  # where the classes of methods, schemes and kernels are


@contextmanager
def around_reload(model: torch.nn.Module) -> Iterator[None]:
    """Give every tensor its old address after a reload inside the block.

    Raises `RuntimeError` if one has another shape.
    """
    # Detached, because Marlin replaces `bias.data`.
    before = {path: tensor.detach() for path, tensor in held_tensors(model)}
    yield
    after = dict(held_tensors(model))
    for path, tensor in after.items():
        if path in before:
            _move_back(path, tensor, before[path])
    # Scratch of the kernels that were replaced: graphs still write into it.
    kept: dict[str, torch.Tensor] = vars(model).setdefault("_kept_for_graphs", {})
    for path in before.keys() - after.keys():
        kept.setdefault(path, before[path])


def _move_back(path: str, tensor: torch.Tensor, old: torch.Tensor) -> None:
    if old.data_ptr() == tensor.data_ptr():
        return
    if (old.shape, old.dtype) != (tensor.shape, tensor.dtype):
        raise RuntimeError(
            f"{path} has the shape {tuple(tensor.shape)} after a reload instead of "
            f"{tuple(old.shape)}: this vLLM cannot reload its kernel. Use another "
            "rollout_quantization."
        )
    old.copy_(tensor)
    tensor.data = old


def held_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what each layer holds, by path.

    These are parameters, buffers, and tensors of its method, its scheme and its kernels.
    """
    seen = {id(layer) for layer in model.modules()}
    for path, layer in model.named_modules():
        yield from _held_by(vars(layer), path, seen)


def _held_by(value: object, path: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if isinstance(value, dict):
        parts = value
    elif type(value).__module__.startswith(LAYERS):
        parts = getattr(value, "__dict__", {})
    else:
        return
    if id(value) not in seen:
        seen.add(id(value))
        for name, part in parts.items():
            yield from _held_by(part, f"{path}.{name}", seen)
