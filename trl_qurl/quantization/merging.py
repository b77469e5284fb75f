"""The parameters of a policy, whole and with adapters merged. Nothing of the policy is changed.

PEFT merges in place, and what it subtracts afterwards is not what it added: in bfloat16, the frozen
base would drift.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.stateless import _reparametrize_module as replace_parameters

from trl_qurl.quantization.checkpoint_form import parameter_name, policy_tensors, whole

Tensors = Iterator[tuple[str, torch.Tensor]]
BASE = ".base_layer."  # part of the names of parameters below an adapter


def model_parameters(model: Any, merges: bool = False, grid: torch.dtype | None = None) -> Tensors:
    """Yield a model's parameters and persistent buffers, each whole while it is read.

    Adapters are merged or left out; autocast's `grid` rounds all else. Collective: every process
    must read to the end.
    """
    reshard(model)
    modules = dict(model.named_modules())
    last = ""  # the layer that `merged` belongs to: its parameters follow each other
    merged: dict[str, torch.Tensor] = {}
    for path, tensor in policy_tensors(model):
        layer, is_base, name = path.partition(BASE)
        if merges and is_base:
            if layer != last:
                merged = merged_layer(modules[layer])
                last = layer
            yield parameter_name(path), merged[name.replace(BASE[1:], "")]
        else:
            with whole([tensor]):
                yield parameter_name(path), on_grid(gathered(tensor), grid)


@torch.no_grad()
def merged_layer(layer: Any) -> dict[str, torch.Tensor]:
    """Return the base's parameters in a PEFT layer, merged with the active adapters, by name.

    They are merged in float32 copies.
    """
    base = layer.get_base_layer()
    dtypes = {name: parameter.dtype for name, parameter in base.named_parameters()}
    parameters = list(layer.parameters())
    device = parameters[0].device.type
    with whole(parameters), torch.autocast(device, enabled=False):
        copies = {
            name: gathered(parameter).to(torch.float32, copy=True)
            for name, parameter in layer.named_parameters()
        }
        with replace_parameters(layer, copies, tie_weights=True):
            for each in layer.modules():  # an adapter of experts may be around another one
                if not hasattr(each, "base_layer"):
                    continue
                if not each.merged and not each.disable_adapters:  # a user may do both
                    each.merge()
                    each.merged_adapters.clear()  # only copies are merged
            return {name: copy.to(dtypes[name]) for name, copy in base.named_parameters()}


def on_grid(tensor: torch.Tensor, grid: torch.dtype | None) -> torch.Tensor:
    """Round a float32 matrix to the values that autocast uses, still in float32.

    Other tensors are returned unchanged.
    """
    if grid is None or tensor.dim() < 2 or tensor.dtype != torch.float32:
        return tensor
    return tensor.to(grid).float()


def gathered(parameter: Any) -> torch.Tensor:
    """Return the whole parameter, which FSDP 2 may have sharded, or moved to the host.

    A collective operation.
    """
    if isinstance(parameter, DTensor):
        on_device: Any = parameter.to(parameter.device_mesh.device_type)
        parameter = on_device.full_tensor()
    tensor: torch.Tensor = parameter.detach()
    return tensor


def reshard(model: nn.Module) -> None:
    """Shard FSDP 2's parameters.

    A forward pass without a backward pass leaves the outermost ones whole.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
