"""A model's linear layers by their names in the checkpoint, and what is never quantized."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from trl_qurl.quantization.checkpoint_form import (
    CheckpointForm,
    expert_modules,
    parameter_name,
    plain_model,
)
from trl_qurl.quantization.scheme import LINEAR

ROUTER = r"(^|\.)(gate|router|shared_expert_gate)(\.|$)"
"""Layers beside experts that select or weigh them. vLLM cannot quantize these."""

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""Groups of layers that vLLM fuses if one module has all of them."""

REST = "*"
"""Pattern for all layers that are left. Other patterns are llm-compressor's: a name, `re:` and a
regular expression that matches the start of a name, or a class name."""


class Layer(NamedTuple):
    """A linear layer, or a matrix of an expert, as patterns see it."""

    names: Collection[str]  # in the checkpoint, and in transformers if it differs
    module: nn.Module  # for patterns of class names
    shape: torch.Size = torch.Size()  # of the weight, (out, in)

    def matches(self, patterns: Sequence[str]) -> bool:
        """Return whether one of llm-compressor's patterns matches the layer."""
        from compressed_tensors.utils import is_match

        return REST in patterns or any(is_match(name, self.module, patterns) for name in self.names)


def ignored_modules(model: nn.Module, ignore: Iterable[str]) -> list[str]:
    """Extend `ignore` with patterns for the modules that always stay in full precision.

    These are all modules outside the language model (vision tower, projector), and the routers of
    experts.
    """
    from transformers import PreTrainedModel

    base = plain_model(model)
    names: list[str] = []
    if isinstance(base, PreTrainedModel) and base.get_decoder() is not base:
        names += _beside(base, base.get_decoder(), base.get_output_embeddings())
    names += _routers(base)
    # Only the last part of a name is the same in transformers, in the checkpoint and in vLLM.
    patterns = [rf"re:.*\b{re.escape(name)}(\.|$)" for name in names]
    return list(dict.fromkeys([*ignore, *patterns]))


def linear_layers(model: nn.Module, layers: Collection[str]) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear modules among `layers`, in model order, by names in the checkpoint."""
    form = CheckpointForm(model)
    for path, module in model.named_modules():
        if not _is_linear(path, module):
            continue
        name = form.name(parameter_name(path))
        if name in layers:
            yield name, module


def _is_linear(path: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and ".lora_" not in path and ".original_module" not in path


def model_layers(model: nn.Module) -> dict[str, Layer]:
    """Return all linear layers and experts, apart from adapters.

    They are named as in the checkpoint, without `.weight`.
    """
    modules: dict[str, nn.Module] = {
        parameter_name(path): module
        for path, module in model.named_modules()
        if _is_linear(path, module)
    }
    expert_prefixes = tuple(f"{parameter_name(path)}." for path, _ in expert_modules(model))
    layers = {}
    for parameter, stored in CheckpointForm(model).layout.items():
        own = parameter.removesuffix(".weight")
        module = modules.get(own)
        if module is None and not parameter.startswith(expert_prefixes):
            continue
        for name, tensor in stored.items():
            layer = name.removesuffix(".weight")
            if layer == name:  # a bias
                continue
            if module is None:  # of an expert
                layers[layer] = Layer({layer}, LINEAR, tensor.shape)
            else:
                layers[layer] = Layer({layer, own}, module, tensor.shape)
    return layers


def fused_groups(layers: Iterable[str]) -> list[tuple[str, ...]]:
    """Group layers as an engine fuses them.

    It fuses projections with one input, and all experts of a block.
    """
    groups: dict[str, list[str]] = {}
    for layer in sorted(layers):
        block, is_expert, _ = layer.partition(".experts.")
        if is_expert:
            key = block
        else:
            parent, _, own = layer.rpartition(".")
            key = f"{parent}.{_fused_name(own)}"
        groups.setdefault(key, []).append(layer)
    return [tuple(group) for group in groups.values()]


def _fused_name(name: str) -> str:
    """Return the first of the layers that an engine fuses with this one, which may be itself."""
    for names in FUSED:
        if name in names:
            return names[0]
    return name


def _beside(model: nn.Module, decoder: nn.Module, head: nn.Module | None) -> Iterator[str]:
    """Yield the last names of the topmost modules that a model has beside its language model."""
    for name, child in model.named_children():
        if child is decoder or child is head:
            continue
        if any(module is decoder for module in child.modules()):
            yield from _beside(child, decoder, head)
        else:
            yield name


def _routers(model: nn.Module) -> Iterator[str]:
    """Yield the last names of the layers that route tokens to experts.

    They are linear in vLLM, but mostly special classes in transformers.
    """
    for block in sorted({path.rpartition(".")[0] for path, _ in expert_modules(model)}):
        for name, module in model.get_submodule(block).named_modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter) and re.search(ROUTER, name):
                yield name.rpartition(".")[2]
