"""The parameters of a policy, whole and with adapters merged, for which nothing of the policy is
written to.

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
    modules, last, merged = dict(model.named_modules()), "", {}
    for path, tensor in policy_tensors(model):
        layer, is_base, name = path.partition(BASE)
        if merges and is_base:
            if layer != last:
                last, merged = layer, merged_layer(modules[layer])
            yield parameter_name(path), merged[name.replace(BASE[1:], "")]
        else:
            with whole([tensor]):
                yield parameter_name(path), on_grid(gathered(tensor), grid)


@torch.no_grad()
def merged_layer(layer: Any) -> dict[str, torch.Tensor]:
    """Return the base's parameters in a PEFT layer, merged with the active adapters in float32
    copies, by name.
    """
    dtypes = {
        name: parameter.dtype for name, parameter in layer.get_base_layer().named_parameters()
    }
    with (
        whole(list(layer.parameters())),
        torch.autocast(next(layer.parameters()).device.type, enabled=False),
    ):
        copies = {
            name: gathered(p).to(torch.float32, copy=True) for name, p in layer.named_parameters()
        }
        with replace_parameters(layer, copies, tie_weights=True):
            for each in layer.modules():  # an adapter of experts may be around another one
                # by a user
                if hasattr(each, "base_layer") and not each.merged and not each.disable_adapters:
                    each.merge()
                    each.merged_adapters.clear()  # only copies are
            return {
                name: p.to(dtypes[name]) for name, p in layer.get_base_layer().named_parameters()
            }


def on_grid(tensor: torch.Tensor, grid: torch.dtype | None) -> torch.Tensor:
    """Round a float32 matrix to the values that autocast uses, still in float32; return other
    tensors unchanged.
    """
    return (
        tensor
        if grid is None or tensor.dim() < 2 or tensor.dtype != torch.float32
        else tensor.to(grid).float()
    )


def gathered(parameter: Any) -> torch.Tensor:
    """Return the whole parameter, which FSDP 2 may have sharded, or moved to the host. A collective
    operation.
    """
    is_shard = isinstance(parameter, DTensor)
    tensor: torch.Tensor = (
        parameter.to(parameter.device_mesh.device_type).full_tensor() if is_shard else parameter
    )
    return tensor.detach()


def reshard(model: nn.Module) -> None:
    """Shard FSDP 2's parameters: a forward pass without a
    backward leaves the outermost ones whole.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
