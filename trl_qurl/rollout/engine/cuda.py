"""Fixes for four bugs in the reload of vLLM 0.31 on GPUs; docs/upstream.md has the reports.

- CUDA graphs read a tensor where it was at their capture, but Marlin kernels move a layer's bias
  (`w4a16`, `w8a16`).
- So do Humming kernels with their locks, and CUTLASS's FP8 experts with what they keep for
  themselves.
- Marlin and Humming kernels for FP8 replace a bias by one that has lost its loader, so the next
  load fails.
- Sleep mode discards the scales of a quantized model's key-value cache, which no load brings back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase

LAYERS = "vllm.model_executor"  # where the classes of methods, schemes and kernels are
CACHE_SCALES = ("_q_scale", "_k_scale", "_v_scale")


@contextmanager
def repaired_reload(model: torch.nn.Module) -> Iterator[None]:
    """Give every tensor its old address after a reload inside the block; `RuntimeError` if one has
    another shape.
    """
    for layer in model.modules():
        bias: Any = layer._parameters.get("bias")
        if isinstance(layer, LinearBase) and bias is not None and not hasattr(bias, "output_dim"):
            bias.output_dim, bias.weight_loader = 0, layer.weight_loader
    # Marlin replaces `bias.data`
    before = {path: tensor.detach() for path, tensor in held_tensors(model)}
    yield
    after = dict(held_tensors(model))
    for path, tensor in after.items():
        old = before.get(path, tensor)
        if old.data_ptr() != tensor.data_ptr():
            if (old.shape, old.dtype) != (tensor.shape, tensor.dtype):
                raise RuntimeError(
                    f"{path} has the shape {tuple(tensor.shape)} after a reload instead of "
                    f"{tuple(old.shape)}: this vLLM cannot reload its kernel. Use another "
                    "rollout_quantization."
                )
            old.copy_(tensor)
            tensor.data = old
        if path.rpartition(".")[2] in CACHE_SCALES and isinstance(tensor, torch.nn.Parameter):
            tensor.data.fill_(1.0)  # as in a fresh engine; vLLM saves only buffers
    # Scratch of the kernels that were replaced: graphs still write into it.
    kept: dict[str, torch.Tensor] = vars(model).setdefault("_kept_for_graphs", {})
    for path in before.keys() - after.keys():
        kept.setdefault(path, before[path])


def held_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what each layer holds, by path: parameters, buffers, and tensors of its method, scheme
    and kernels.
    """
    seen = set(map(id, model.modules()))
    for path, layer in model.named_modules():
        yield from _held_by(vars(layer), path, seen)


def _held_by(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif id(value) not in seen and (
        isinstance(value, dict) or type(value).__module__.startswith(LAYERS)
    ):
        seen.add(id(value))
        for name, part in (
            value if isinstance(value, dict) else getattr(value, "__dict__", {})
        ).items():
            yield from _held_by(part, f"{path}.{name}", seen)
