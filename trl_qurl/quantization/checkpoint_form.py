"""Checkpoint layout of a model's parameters, which engines load.

transformers renames the tensors of some checkpoints (vision-language models), and fuses the experts
of a layer. Like `save_pretrained`, this module reverts that conversion, but one parameter at a
time. Experts to quantize become one matrix each, with llm-compressor's names.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""Tensors with their names."""

EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of experts' weights in transformers; biases append `_bias`."""


def whole(parameters: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Gather parameters that ZeRO-3 shards, for the duration of a context that may change them."""
    # Slow to import, and the command line needs this file.
    from transformers.integrations import is_deepspeed_zero3_enabled

    if not is_deepspeed_zero3_enabled():
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0)


def parameter_name(name: str) -> str:
    """Return transformers' name for a module or parameter that PEFT or checkpointing wrapped."""
    return re.sub(
        r"^base_model\.model\.|\.base_layer|\.modules_to_save\.[^.]+|_checkpoint_wrapped_module\.",
        "",
        name,
    )


def has_wrapper(model: Any) -> bool:
    """Return whether PEFT has wrapped a model, and not only added layers to it."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def plain_model(model: Any) -> "PreTrainedModel":
    """Return a model without PEFT's wrapper."""
    if has_wrapper(model):
        return model.get_base_model()
    return model


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that a checkpoint stores beside parameters (router biases), with names."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def policy_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a policy's parameters and persistent buffers, with paths.

    Adapters are left out, and so is what active ones replace.
    """
    is_disabled = any(
        getattr(module, "disable_adapters", None) is True for module in model.modules()
    )
    left_out = [".lora_"]
    if is_disabled:
        left_out.append(".modules_to_save.")
    else:
        left_out.append(".original_module.")
    if has_wrapper(model):
        inactive = model.peft_config.keys() - model.active_adapters
        left_out.append(f".{model.prefix}")
        left_out.extend(f".modules_to_save.{name}." for name in inactive)
    for path, tensor in (*model.named_parameters(), *persistent_buffers(model)):
        if not any(part in path for part in left_out):
            yield path.replace(".original_module.", ".modules_to_save.none."), tensor


def expert_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules that hold experts in three-dimensional parameters, with their names."""
    for name, module in model.named_modules():
        weight = getattr(module, "down_proj", None)
        # `use_experts_implementation` of transformers sets flags such as this one, which describe
        # the layout of the weights.
        if isinstance(weight, nn.Parameter) and hasattr(module, "is_transposed"):
            yield name, module


def expert_layers(layers: Iterable[str]) -> list[str]:
    """Return the layers that belong to experts."""
    return [layer for layer in layers if ".experts." in layer]


class CheckpointForm:
    """Layout in which a checkpoint stores a model's parameters.

    Parameters may be empty, sharded or on no device. With `splits_experts`, experts are separate
    matrices, as in llm-compressor's checkpoints. Raises `ValueError` if one tensor of the
    checkpoint holds several parameters.
    """

    # The checkpoint's tensors, on the meta device, by parameter and name.
    layout: dict[str, dict[str, torch.Tensor]]

    def __init__(self, model: nn.Module, splits_experts: bool = True) -> None:
        self._model = plain_model(model)
        modules = expert_modules(model) if splits_experts else ()
        self._experts = {parameter_name(path): experts for path, experts in modules}
        parts: dict[str, dict[str, torch.Tensor]] = {}  # by parameter
        plain: dict[str, torch.Tensor] = {}  # all parts
        for path, parameter in policy_tensors(model):
            # ZeRO-3 keeps the full shape of what it shards here.
            shape = getattr(parameter, "ds_shape", parameter.shape)
            full = torch.empty(shape, dtype=parameter.dtype, device="meta")
            name = parameter_name(path)
            parts[name] = dict(self._split(name, full))
            plain.update(parts[name])
        stored = _reverted(self._model, plain)
        # A renamed tensor is still the same object.
        names = {id(tensor): name for name, tensor in stored.items()}
        self._renamed = {
            name: names[id(tensor)] for name, tensor in plain.items() if id(tensor) in names
        }
        self.layout = {name: dict(self._rename(entries)) for name, entries in parts.items()}
        for name, tensors in self.layout.items():
            for stored_name, tensor in tensors.items():
                if stored_name not in stored or stored[stored_name].shape != tensor.shape:
                    raise ValueError(
                        f"The checkpoint of {type(self._model).__name__} holds {name} together "
                        f"with other parameters in one tensor ({stored_name}), so they cannot be "
                        "sent to an engine one by one: use TRL's own trainer with use_vllm=False."
                    )

    def convert(self, named_parameters: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Convert parameters into the checkpoint's tensors, one parameter at a time."""
        for name, parameter in named_parameters:
            yield from self._rename(dict(self._split(name, parameter)))

    def name(self, name: str) -> str:
        """Return a layer's name in the checkpoint; its own if it shares another layer's weight."""
        stored = self.layout.get(f"{name}.weight")
        if stored is None:
            return name
        return next(iter(stored)).removesuffix(".weight")

    def _split(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Split a parameter of experts into each expert's parts, as views.

        Parts have names such as `3.gate_proj.weight`. The parameter is (experts, out, in) or
        (experts, in, out), or a bias, (experts, out). Other ones stay whole.
        """
        path, _, last = name.rpartition(".")
        experts = self._experts.get(path)
        layer = last.removesuffix("_bias")
        if experts is None or layer not in EXPERT_WEIGHTS:
            yield name, tensor
            return
        kind = "weight" if layer == last else "bias"
        for index, part in enumerate(tensor):
            if experts.is_transposed and kind == "weight":
                part = part.T
            # Now it is (out, in) or (out,).
            if layer != "gate_up_proj":
                yield f"{path}.{index}.{layer}.{kind}", part
                continue
            if experts.is_concatenated:
                gate, up = part.chunk(2)
            else:
                gate = part[0::2]
                up = part[1::2]
            yield f"{path}.{index}.gate_proj.{kind}", gate
            yield f"{path}.{index}.up_proj.{kind}", up

    def _rename(self, entries: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in entries.items():
            if name in self._renamed:
                yield self._renamed[name], tensor
            else:
                yield from _reverted(self._model, {name: tensor}).items()


def _reverted(
    model: "PreTrainedModel", tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)
