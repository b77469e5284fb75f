"""Selection of the layers to quantize, by their names in the checkpoint."""

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from trl_qurl.quantization.checkpoint_form import CheckpointForm, expert_modules, parameter_name, plain_model
from trl_qurl.quantization.scheme import HEAD, LINEAR, QuantizationScheme

RELOADABLE = ("qwen3_5_text",)
"""Recurrent models (`model_type`) for which an engine after training matched a fresh one."""

ROUTER = r"(^|\.)(gate|router|shared_expert_gate)(\.|$)"
"""Layers beside experts that select or weigh them. vLLM cannot quantize these."""


def quantized_layer_names(
    model: nn.Module, ignore: Iterable[str] = ("lm_head",), scheme: QuantizationScheme | None = None
) -> frozenset[str]:
    """Return the layers to quantize: linear layers and experts that no pattern of `ignored_modules` matches.

    Args:
        model: A transformers model, or a PEFT model around one. Adapters are left out: a sync merges them.
        ignore: Patterns as in llm-compressor: a module's full name, `"re:"` plus a regular expression that matches the
            start of the name, or a class name.
        scheme: Format that all of these layers must fit; `None` to skip that check.

    Returns:
        Names of layers in the checkpoint without `.weight`, e.g. `"model.layers.0.self_attn.q_proj"`.

    Raises:
        ValueError: If there is nothing to quantize, the scheme cannot store a layer, or an output head to quantize
            shares its weight with the embedding.
    """
    layers = layer_shapes(model, ignore)
    if not layers:
        raise ValueError(
            f"quantization_ignore={list(ignore)} matches all {len(layer_shapes(model, ()))} linear layers of "
            f"{type(model).__name__}, so there is nothing to quantize: narrow the patterns, or set "
            "rollout_quantization=None."
        )
    _check_head(model, ignore)
    if scheme is None:
        return frozenset(layers)
    head = "vLLM cannot load an output head in this format"
    checked = {
        name: head if name.endswith(HEAD) and not scheme.heads else scheme.refusal(shape)
        for name, shape in layers.items()
    }
    reasons = {name: reason for name, reason in checked.items() if reason}
    if reasons:
        first, reason = next(iter(reasons.items()))
        patterns = sorted({f"re:.*{name.rpartition('.')[2]}" for name in reasons})
        raise ValueError(
            f"{scheme.name} cannot quantize {len(reasons)} of the {len(layers)} layers, first {first}: {reason}. "
            "Choose another format, or add "
            f"{', '.join(map(repr, patterns))} to quantization_ignore (`--ignore` on the command line) to keep them "
            "in full precision."
        )
    return frozenset(layers)


def ignored_modules(model: Any, ignore: Iterable[str]) -> list[str]:
    """Extend `ignore` with patterns for the modules that always stay in full precision.

    These are all modules outside the language model (vision tower, projector), and the routers of experts.
    """
    base, ignore = plain_model(model), list(ignore)
    paths = [*_paths_beside_language_model(base), *_router_paths(base)]
    # Only the last part of a name is the same in transformers, in the checkpoint and in vLLM.
    patterns = dict.fromkeys(rf"re:.*\b{re.escape(path.rpartition('.')[2])}(\.|$)" for path in paths)
    return [*ignore, *(pattern for pattern in patterns if pattern not in ignore)]


def linear_layers(model: nn.Module, layers: Collection[str]) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear modules among `layers`, in model order, with their names in the checkpoint."""
    form = CheckpointForm(model)
    for path, module in model.named_modules():
        if _is_linear(path, module) and (name := form.name(parameter_name(path))) in layers:
            yield name, module


def _check_head(model: Any, ignore: Iterable[str]) -> None:
    """Raise `ValueError` if an output head to quantize shares its weight with the embedding."""
    from compressed_tensors.utils import is_match

    base = plain_model(model)
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    if not isinstance(head, nn.Linear) or head.weight is not embedding.weight:
        return
    path = next(path for path, module in base.named_modules() if module is head)
    if not is_match(path, head, tuple(ignore)):
        raise ValueError(
            f"{path} shares its weight with the embedding, which vLLM keeps in 16 bits to look up tokens: keep "
            f"'{HEAD}' in quantization_ignore, or untie the model first."
        )


def check_recurrent_layers(model: Any) -> None:
    """Raise `ValueError` for recurrent layers: after vLLM's reload, Mamba 2 computes with other weights."""
    config = model.config.get_text_config()
    is_recurrent = model._is_stateful or "conv" in (getattr(config, "layer_types", None) or ())
    if is_recurrent and config.model_type not in RELOADABLE:
        raise ValueError(
            f"{type(model).__name__} has recurrent layers (Mamba, linear attention, convolutions), and no sync is "
            "known to update them correctly: use a model without such layers (or Qwen 3.5), or TRL's own trainer with "
            "use_vllm=False."
        )


def _is_linear(path: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and ".lora_" not in path and ".original_module" not in path


def layer_shapes(model: nn.Module, ignore: Iterable[str] = ("lm_head",)) -> dict[str, torch.Size]:
    """Return the shapes (out, in) of what `quantized_layer_names` names, without its checks."""
    from compressed_tensors.utils import is_match

    patterns, form = ignored_modules(model, ignore), CheckpointForm(model)
    modules: dict[str, nn.Module] = {
        parameter_name(path): module for path, module in model.named_modules() if _is_linear(path, module)
    }
    expert_prefixes = tuple(f"{parameter_name(path)}." for path, _ in expert_modules(model))
    shapes = {}
    for parameter, stored in form.layout.items():
        module = modules.get(parameter.removesuffix(".weight"))
        if module is None and not parameter.startswith(expert_prefixes):
            continue
        for name, tensor in stored.items():
            layer = name.removesuffix(".weight")
            names = {layer, parameter.removesuffix(".weight")} if module is not None else {layer}
            if layer != name and not any(is_match(n, module or LINEAR, patterns) for n in names):
                shapes[layer] = tensor.shape
    return shapes


def _paths_beside_language_model(model: Any) -> list[str]:
    """Return the topmost modules of a vision-language model outside its language model."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return []
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    modules = dict(model.named_modules())
    root = next((path for path, module in modules.items() if module is decoder), "")
    parents = [path for path in modules if path != root and f"{root}.".startswith(f"{path}." if path else "")]
    return [
        f"{parent}.{name}" if parent else name
        for parent in parents
        for name, child in modules[parent].named_children()
        if child not in (head, decoder) and f"{parent}.{name}".lstrip(".") not in parents
    ]


def _router_paths(model: nn.Module) -> list[str]:
    """Return the layers that route tokens to experts: linear in vLLM, but mostly special classes in transformers."""
    blocks = {path.rpartition(".")[0] for path, _ in expert_modules(model)}
    return [
        f"{block}.{name}"
        for block in sorted(blocks)
        for name, module in model.get_submodule(block).named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter) and re.search(ROUTER, name)
    ]
