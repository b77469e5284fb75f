"""A model's linear layers by their names in the checkpoint, and what is never quantized."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from trl_qurl.quantization.checkpoint_form import (
    CheckpointForm,
    expert_modules,
    parameter_name,
    plain_model,
)
from trl_qurl.quantization.scheme import LINEAR

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RELOADABLE = ("qwen3_5_text",)
"""Recurrent models (`model_type`) for which an engine after training matched a fresh one."""

ROUTER = r"(^|\.)(gate|router|shared_expert_gate)(\.|$)"
"""Layers beside experts that select or weigh them. vLLM cannot quantize these."""

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""Groups of layers that vLLM fuses if one module has all of them."""


LARGE_KEYS = (
    "kv_cache_dtype={!r} has scales of 1, but this model's keys have biases and no norm, as "
    "Qwen2.5's, and may be too large for it: leave kv_cache_dtype out, or try "
    "'fp8_per_token_head' or 'int8_per_token_head' (on a GPU) and compare mismatch/kl_k3."
)


class Layer(NamedTuple):
    """A linear layer, or a matrix of an expert, as patterns see it."""

    names: Collection[str]  # in the checkpoint, and in transformers if it differs
    module: nn.Module  # for patterns of class names
    shape: torch.Size = torch.Size()  # of the weight, (out, in)

    def matches(self, patterns: Sequence[str]) -> bool:
        """Return whether one of llm-compressor's patterns matches the layer."""
        from compressed_tensors.utils import is_match

        return any(is_match(name, self.module, patterns) for name in self.names)


def has_large_keys(model: nn.Module) -> bool:
    """Return whether a model's keys may be hundreds wide: they have biases, and no norm."""
    names = [name for name, _ in model.named_parameters()]
    has_norm = any("k_norm." in name for name in names)
    return not has_norm and any("k_proj." in name and name.endswith("bias") for name in names)


def ignored_modules(model: nn.Module, ignore: Iterable[str]) -> list[str]:
    """Extend `ignore` with patterns for the modules that always stay in full precision.

    These are all modules outside the language model (vision tower, projector), and the routers of
    experts.
    """
    base = plain_model(model)
    patterns = list(ignore)
    for path in [*_paths_beside_language_model(base), *_router_paths(base)]:
        # Only the last part of a name is the same in transformers, in the checkpoint and in vLLM.
        last = path.rpartition(".")[2]
        pattern = rf"re:.*\b{re.escape(last)}(\.|$)"
        if pattern not in patterns:
            patterns.append(pattern)
    return patterns


def linear_layers(model: nn.Module, layers: Collection[str]) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear modules among `layers`, in model order, by names in the checkpoint."""
    form = CheckpointForm(model)
    for path, module in model.named_modules():
        if not _is_linear(path, module):
            continue
        name = form.name(parameter_name(path))
        if name in layers:
            yield name, module


def check_recurrent_layers(model: "PreTrainedModel") -> None:
    """Raise `ValueError` for recurrent layers.

    After vLLM's reload, Mamba 2 computes with other weights.
    """
    config = model.config.get_text_config()
    is_recurrent = model._is_stateful or "conv" in (getattr(config, "layer_types", None) or ())
    if is_recurrent and config.model_type not in RELOADABLE:
        raise ValueError(
            f"{type(model).__name__} has recurrent layers (Mamba, linear attention, convolutions), "
            "and no sync is known to update them correctly: use a model without such layers (or "
            "Qwen 3.5), or TRL's own trainer with use_vllm=False."
        )


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


def _paths_beside_language_model(model: nn.Module) -> list[str]:
    """Return the topmost modules of a vision-language model outside its language model."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return []
    decoder = model.get_decoder()
    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    root = next((path for path, module in modules.items() if module is decoder), "")
    parents = [path for path in modules if path != root and _contains(path, root)]
    beside = []
    for parent in parents:
        for name, child in modules[parent].named_children():
            path = f"{parent}.{name}".removeprefix(".")
            if child not in (head, decoder) and path not in parents:
                beside.append(path)
    return beside


def _contains(path: str, inner: str) -> bool:
    """Return whether a module, of which the model's path is empty, contains another one."""
    return path == "" or inner.startswith(f"{path}.")


def _router_paths(model: nn.Module) -> list[str]:
    """Return the layers that route tokens to experts.

    They are linear in vLLM, but mostly special classes in transformers.
    """
    routers = []
    for block in sorted({path.rpartition(".")[0] for path, _ in expert_modules(model)}):
        for name, module in model.get_submodule(block).named_modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter) and re.search(ROUTER, name):
                routers.append(f"{block}.{name}")
    return routers
