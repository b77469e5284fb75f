"""How a checkpoint holds a model's parameters, which is the form that engines load: other names, and other cuts.

transformers loads some checkpoints under other names (vision-language models), and fuses the experts of a layer. Its
own conversion, which `save_pretrained` reverts, is reverted here as well, one parameter at a time.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from trl_qurl.quantization.experts import WEIGHTS, expert_modules, split_experts
from trl_qurl.quantization.stream import NamedTensors


def parameter_name(name: str) -> str:
    """The name that transformers has for a module or parameter of a possibly PEFT-wrapped model."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".modules_to_save.default", "")


def plain_model(model: Any) -> Any:
    """A model without PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a checkpoint holds beside parameters (biases that choose experts), with their names."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


class CheckpointForm:
    """The form in which a checkpoint holds a model's parameters.

    Args:
        model: A transformers model, or a PEFT model around one. Its parameters may be empty, sharded or on no device.
        splits_experts: Whether each expert has matrices of its own, under llm-compressor's names, as in its quantized
            checkpoints; otherwise as in the model's own checkpoint.

    Raises:
        ValueError: The checkpoint has several of the model's parameters in one tensor.
    """

    def __init__(self, model: nn.Module, splits_experts: bool = True) -> None:
        self._model = plain_model(model)
        modules = expert_modules(model) if splits_experts else ()
        self._experts = {parameter_name(path): experts for path, experts in modules}
        self.held: dict[str, dict[str, torch.Tensor]] = {}  # what each parameter becomes, without values
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for path, parameter in [*model.named_parameters(), *persistent_buffers(model)]:
            if ".lora_" not in path and ".original_module" not in path:
                shape = getattr(parameter, "ds_shape", parameter.shape)  # the whole of what ZeRO-3 shards
                whole = torch.empty(shape, dtype=parameter.dtype, device="meta")
                parts[parameter_name(path)] = dict(self._split(parameter_name(path), whole))
        plain = {name: tensor for entries in parts.values() for name, tensor in entries.items()}
        held = _reverted(self._model, plain)
        names = {id(tensor): name for name, tensor in held.items()}  # what is only renamed stays the same tensor
        self._renamed = {name: names[id(tensor)] for name, tensor in plain.items() if id(tensor) in names}
        for name, entries in parts.items():
            self.held[name] = dict(self._convert(entries))
            for held_name, tensor in self.held[name].items():
                if held_name not in held or held[held_name].shape != tensor.shape:
                    raise ValueError(
                        f"The checkpoint of {type(self._model).__name__} holds {name} together with other parameters "
                        f"in one tensor ({held_name}), which no engine can be sent one by one: use TRL's own trainer "
                        "with use_vllm=False."
                    )

    def tensors(self, named_parameters: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Turn a stream of a model's parameters into that of its checkpoint, one parameter at a time."""
        for name, parameter in named_parameters:
            yield from self._convert(dict(self._split(name, parameter)))

    def name(self, name: str) -> str:
        """The name in the checkpoint of a layer that has one weight; its own if it shares another's."""
        return next(iter(self.held.get(f"{name}.weight", [name]))).removesuffix(".weight")

    def _split(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        path, _, last = name.rpartition(".")
        if path in self._experts and last.removesuffix("_bias") in WEIGHTS:
            parts = split_experts(self._experts[path], last, tensor)
            return ((f"{path}.{part}", matrix) for part, matrix in parts)
        return iter([(name, tensor)])

    def _convert(self, entries: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in entries.items():
            if name in self._renamed:
                yield self._renamed[name], tensor
            else:
                yield from _reverted(self._model, {name: tensor}).items()


def _reverted(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)
