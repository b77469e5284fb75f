"""Which layers of a model are quantized, by their names in its checkpoint.

This is the only part of quantization that looks at modules rather than tensors.
"""

from collections.abc import Collection, Iterable

from torch import nn

from trl_qurl.quantization.schemes import QuantizationScheme


def linear_layer_names(model: nn.Module, ignore: Iterable[str] = ("lm_head",)) -> frozenset[str]:
    """Like `quantized_layer_names`, but without checks: the layers may be none, and may fit no format."""
    from compressed_tensors.utils import is_match

    ignore = tuple(ignore)
    return frozenset(
        checkpoint_name(name)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not _is_adapter(name)
        and not is_match(checkpoint_name(name), module, ignore)
    )


def quantized_layer_names(
    model: nn.Module, ignore: Iterable[str] = ("lm_head",), scheme: QuantizationScheme | None = None
) -> frozenset[str]:
    """
    Names of the linear layers that are quantized: every `nn.Linear` that no pattern of `ignore` matches.

    Args:
        model: A transformers model, or a PEFT model around one. Adapters are left out, because they are merged into
            their base layers before a sync.
        ignore: compressed-tensors patterns, as in llm-compressor: a module's full name, `"re:"` and a regular
            expression that matches the start of the name, or a class name.
        scheme: Format that all of these layers must fit; `None` to skip that check.

    Returns:
        Layer names without `.weight`, e.g. `"model.layers.0.self_attn.q_proj"`.

    Raises:
        ValueError: If nothing is left to quantize, if the scheme cannot store one of the layers, or if the model has
            fused expert weights, which no scheme covers.
    """
    names = linear_layer_names(model, ignore)
    if not names:
        raise ValueError(
            f"quantization_ignore={list(ignore)} matches all {len(linear_layer_names(model, ()))} linear layers of "
            f"{type(model).__name__}, so there is nothing to quantize: narrow the patterns, or set "
            "rollout_quantization=None to quantize nothing."
        )
    if fused := [name for name, weight in model.named_parameters() if weight.ndim == 3 and "expert" in name]:
        raise ValueError(
            f"{type(model).__name__} keeps its experts in fused three-dimensional weights ({fused[0]}), which "
            "rollout_quantization does not cover yet: set rollout_quantization=None to quantize nothing."
        )
    if scheme is not None:
        _check_shapes(model, names, scheme)
    return names


def _check_shapes(model: nn.Module, names: Collection[str], scheme: QuantizationScheme) -> None:
    refusals = {
        layer: reason
        for name, module in model.named_modules()
        if (layer := checkpoint_name(name)) in names
        and isinstance(module, nn.Linear)
        and (reason := scheme.refusal((module.out_features, module.in_features)))
    }
    if refusals:
        first, reason = next(iter(refusals.items()))
        patterns = sorted({f"re:.*{layer.rpartition('.')[2]}" for layer in refusals})
        raise ValueError(
            f"{scheme.name} cannot quantize {len(refusals)} of the {len(names)} layers, first {first}: {reason}. "
            f"Choose another format, or add {', '.join(map(repr, patterns))} to quantization_ignore (`--ignore` on "
            "the command line) to keep them in full precision."
        )


def checkpoint_name(name: str) -> str:
    """The name that a checkpoint (and vLLM) uses for a module or parameter of a possibly PEFT-wrapped model."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".modules_to_save.default", "")


def _is_adapter(name: str) -> bool:
    return ".lora_" in name or ".original_module" in name
