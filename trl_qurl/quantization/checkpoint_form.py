"""Checkpoint layout of a model's parameters, which engines load: other names, and tensors split
differently.

transformers renames the tensors of some checkpoints (vision-language models), and fuses the experts
of a layer. Like `save_pretrained`, this module reverts that conversion, but one parameter at a
time. Experts to quantize become one matrix each, with llm-compressor's names.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""Tensors with their names."""

EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of experts' weights in transformers; biases append `_bias`."""


def whole(parameters: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Gather parameters that ZeRO-3 shards, for the duration of a context that may change them."""
    # slow, and the command line needs this file
    from transformers.integrations import is_deepspeed_zero3_enabled

    if not is_deepspeed_zero3_enabled():
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0)


def parameter_name(name: str) -> str:
    """Return transformers' name for a module or parameter of a model that PEFT, or checkpointing,
    may have wrapped.
    """
    return re.sub(
        r"^base_model\.model\.|\.base_layer|\.modules_to_save\.[^.]+|_checkpoint_wrapped_module\.",
        "",
        name,
    )


def plain_model(model: Any) -> Any:
    """Return a model without PEFT's wrapper."""
    return (
        model.get_base_model()
        if hasattr(model, "peft_config") and hasattr(model, "get_base_model")
        else model
    )


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that a checkpoint stores beside parameters (router biases), with their
    names.
    """
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def policy_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a policy's parameters and persistent buffers, without adapters and what these replace,
    with paths.
    """
    is_disabled = any(
        getattr(module, "disable_adapters", None) is True for module in model.modules()
    )
    left_out = [".lora_", ".modules_to_save." if is_disabled else ".original_module."]
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        others = model.peft_config.keys() - model.active_adapters
        left_out += [f".{model.prefix}", *(f".modules_to_save.{name}." for name in others)]
    for path, tensor in (*model.named_parameters(), *persistent_buffers(model)):
        if not any(part in path for part in left_out):
            yield path.replace(".original_module.", ".modules_to_save.none."), tensor


def expert_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules that hold experts in three-dimensional parameters, with their names."""
    for name, module in model.named_modules():
        weight = getattr(module, "down_proj", None)
        # transformers' `use_experts_implementation` sets flags such as this one, which describe the
        # weights' layout.
        if isinstance(weight, nn.Parameter) and hasattr(module, "is_transposed"):
            yield name, module


def expert_layers(layers: Iterable[str]) -> list[str]:
    """Return the layers that belong to experts."""
    return [layer for layer in layers if ".experts." in layer]


class CheckpointForm:
    """Layout in which a checkpoint stores a model's parameters, which may be empty, sharded or on
    no device.

    With `splits_experts`, experts are separate matrices, as in llm-compressor's checkpoints. Raises
    `ValueError` if one tensor of the checkpoint holds several parameters.
    """

    # the checkpoint's tensors, on the meta device, by parameter and name
    layout: dict[str, dict[str, torch.Tensor]]

    def __init__(self, model: nn.Module, splits_experts: bool = True) -> None:
        self._model = plain_model(model)
        modules = expert_modules(model) if splits_experts else ()
        self._experts = {parameter_name(path): experts for path, experts in modules}
        self.layout = {}
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for path, parameter in policy_tensors(model):
            # the full shape if ZeRO-3 shards it
            shape = getattr(parameter, "ds_shape", parameter.shape)
            full = torch.empty(shape, dtype=parameter.dtype, device="meta")
            parts[parameter_name(path)] = dict(self._split(parameter_name(path), full))
        plain = {name: tensor for entries in parts.values() for name, tensor in entries.items()}
        stored = _reverted(self._model, plain)
        # a renamed tensor is still the same object
        names = {id(tensor): name for name, tensor in stored.items()}
        self._renamed = {
            name: names[id(tensor)] for name, tensor in plain.items() if id(tensor) in names
        }
        for name, entries in parts.items():
            self.layout[name] = dict(self._rename(entries))
            for stored_name, tensor in self.layout[name].items():
                if stored_name not in stored or stored[stored_name].shape != tensor.shape:
                    raise ValueError(
                        f"The checkpoint of {type(self._model).__name__} holds {name} together "
                        f"with other parameters in one tensor ({stored_name}), so they cannot be "
                        "sent to an engine one by one: use TRL's own trainer with use_vllm=False."
                    )

    def convert(self, named_parameters: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Convert a stream of a model's parameters into its checkpoint's tensors, one parameter at
        a time.
        """
        for name, parameter in named_parameters:
            yield from self._rename(dict(self._split(name, parameter)))

    def name(self, name: str) -> str:
        """Return a layer's name in the checkpoint, or its own if
        it shares another layer's weight.
        """
        return next(iter(self.layout.get(f"{name}.weight", [name]))).removesuffix(".weight")

    def _split(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Split a parameter of experts into each expert's parts, as views, with names such as
        `3.gate_proj.weight`.

        The parameter is (experts, out, in) or (experts, in, out), or a bias, (experts, out). Other
        ones stay whole.
        """
        path, _, last = name.rpartition(".")
        experts, layer = self._experts.get(path), last.removesuffix("_bias")
        if experts is None or layer not in EXPERT_WEIGHTS:
            yield name, tensor
            return
        kind = "weight" if layer == last else "bias"
        for index, part in enumerate(tensor):
            # (out, in) or (out,)
            matrix = part.T if experts.is_transposed and kind == "weight" else part
            if layer == "gate_up_proj":
                gate, up = (
                    matrix.chunk(2) if experts.is_concatenated else (matrix[0::2], matrix[1::2])
                )
                yield f"{path}.{index}.gate_proj.{kind}", gate
                yield f"{path}.{index}.up_proj.{kind}", up
            else:
                yield f"{path}.{index}.{layer}.{kind}", matrix

    def _rename(self, entries: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in entries.items():
            if name in self._renamed:
                yield self._renamed[name], tensor
            else:
                yield from _reverted(self._model, {name: tensor}).items()


def _reverted(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)
