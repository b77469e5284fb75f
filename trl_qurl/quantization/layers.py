"""Which layers of a model are quantized, by their names in its checkpoint."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import nn

from trl_qurl.quantization.schemes import QuantizationScheme
from trl_qurl.quantization.schemes.scheme import HEAD

RELOADABLE = ("qwen3_5_text",)
"""Recurrent models, as transformers calls them, whose engine was equal to a fresh one after training."""


def linear_layer_names(model: nn.Module, ignore: Iterable[str] = ("lm_head",)) -> frozenset[str]:
    """Like `quantized_layer_names`, but without checks: the layers may be none, and may fit no format."""
    return frozenset(_linear_layers(model, ignore))


def quantized_layer_names(
    model: nn.Module, ignore: Iterable[str] = ("lm_head",), scheme: QuantizationScheme | None = None
) -> frozenset[str]:
    """Name the linear layers that are quantized: every `nn.Linear` that no pattern of `ignore` matches.

    Args:
        model: A transformers model, or a PEFT model around one. Adapters are left out: a sync merges them.
        ignore: Patterns as in llm-compressor: a module's full name, `"re:"` and a regular expression that matches the
            start of the name, or a class name.
        scheme: Format that all of these layers must fit; `None` to skip that check.

    Returns:
        Layer names without `.weight`, e.g. `"model.layers.0.self_attn.q_proj"`.

    Raises:
        ValueError: If nothing is left to quantize, the scheme cannot store a layer, the model fuses its experts, or an
            output head to quantize shares its weight with the embedding.
    """
    layers = _linear_layers(model, ignore)
    if not layers:
        raise ValueError(
            f"quantization_ignore={list(ignore)} matches all {len(_linear_layers(model, ()))} linear layers of "
            f"{type(model).__name__}, so there is nothing to quantize: narrow the patterns, or set "
            "rollout_quantization=None."
        )
    if fused := [name for name, weight in model.named_parameters() if weight.ndim == 3 and "expert" in name]:
        raise ValueError(
            f"{type(model).__name__} keeps its experts in fused three-dimensional weights ({fused[0]}), which "
            "rollout_quantization does not cover yet: set rollout_quantization=None."
        )
    _check_head(model, layers)
    shapes = {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}
    refusals = {name: reason for name, shape in shapes.items() if scheme and (reason := _refusal(name, shape, scheme))}
    if scheme and refusals:
        first, reason = next(iter(refusals.items()))
        patterns = sorted({f"re:.*{name.rpartition('.')[2]}" for name in refusals})
        raise ValueError(
            f"{scheme.name} cannot quantize {len(refusals)} of the {len(layers)} layers, first {first}: {reason}. "
            f"Choose another format, or add {', '.join(map(repr, patterns))} to quantization_ignore (`--ignore` on "
            "the command line) to keep them in full precision."
        )
    return frozenset(layers)


def _check_head(model: nn.Module, layers: Collection[str]) -> None:
    """Raise `ValueError` if one of the layers shares its weight with an embedding, as a tied output head does."""
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    linear = {checkpoint_name(name): module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    tied = [name for name in layers if name in linear and id(linear[name].weight) in embedded]
    if tied:
        raise ValueError(
            f"{tied[0]} shares its weight with the embedding, which vLLM keeps in 16 bits to look tokens up: keep "
            f"'{HEAD}' in quantization_ignore, or untie the model first."
        )


def _refusal(name: str, shape: Sequence[int], scheme: QuantizationScheme) -> str | None:
    """Why the scheme cannot store a layer, or vLLM cannot load it."""
    if name.endswith(HEAD) and not scheme.heads:
        return "vLLM cannot load an output head in this format"
    return scheme.refusal(shape)


def check_recurrent_layers(model: Any) -> None:
    """Raise `ValueError` for layers that keep a state: after vLLM's reload, Mamba 2 computes with other weights."""
    config = model.config.get_text_config()
    is_recurrent = model._is_stateful or "conv" in (getattr(config, "layer_types", None) or ())
    if is_recurrent and config.model_type not in RELOADABLE:
        raise ValueError(
            f"{type(model).__name__} has recurrent layers (Mamba, linear attention, convolutions), which no sync is "
            "known to bring up to date: use a model that has none (or Qwen 3.5), or TRL's own trainer with "
            "use_vllm=False."
        )


def _linear_layers(model: nn.Module, ignore: Iterable[str]) -> dict[str, nn.Linear]:
    from compressed_tensors.utils import is_match

    ignore = tuple(ignore)
    return {
        checkpoint_name(name): module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and ".lora_" not in name
        and ".original_module" not in name
        and not is_match(checkpoint_name(name), module, ignore)
    }


def checkpoint_name(name: str) -> str:
    """The name that a checkpoint (and vLLM) uses for a module or parameter of a possibly PEFT-wrapped model."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".modules_to_save.default", "")
