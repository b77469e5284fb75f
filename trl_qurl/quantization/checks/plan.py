"""Refusals of plans: patterns, layers and formats that do not fit each other."""

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from torch import nn

from trl_qurl.quantization.checkpoint_form import plain_model
from trl_qurl.quantization.checks.shapes import storage_obstacle
from trl_qurl.quantization.layers import Layer, fused_groups
from trl_qurl.quantization.scheme import HEAD, QuantizationScheme, Rule


def check_patterns(patterns: Any, name: str) -> None:
    """Raise `ValueError` for a pattern that isn't text, or a regular expression after `re:`."""
    if not isinstance(patterns, list | tuple):
        raise ValueError(f"{name} is {patterns!r}, but must be a list of patterns, or [] for none.")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(
                f"{name} has the pattern {pattern!r}, which is not text: write it in quotes."
            )
        if not pattern.startswith("re:"):
            continue
        try:
            re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise ValueError(
                f"{name} has {pattern!r}, which is no regular expression: correct it ({error})."
            ) from None


def check_useful(
    model: nn.Module, layers: Mapping[str, Layer], pattern: str, is_kept: bool, setting: str
) -> None:
    """Raise `ValueError` for a pattern that decides about no layer.

    One for 16 bits may match any module.
    """
    base = plain_model(model)
    matches_layer = any(layer.matches([pattern]) for layer in layers.values())
    if is_kept:
        modules = (Layer((path,), module) for path, module in base.named_modules())
        if matches_layer or any(module.matches([pattern]) for module in modules):
            return
    if matches_layer:
        reason = "only layers of earlier patterns, or of quantization_ignore: put it before those"
    else:
        example = [*get_close_matches(pattern, layers, 1), *layers][0]
        reason = f"no layer of {type(base).__name__}: use names such as {example!r}"
    raise ValueError(f"{setting} has the pattern {pattern!r}, which matches {reason}.")


def check_head(model: nn.Module, kept: Sequence[str], rules: Sequence[Rule]) -> None:
    """Raise `ValueError` if an output head to quantize shares its weight with the embedding."""
    base = plain_model(model)
    head = base.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.weight is not base.get_input_embeddings().weight:
        return
    path = next(path for path, module in base.named_modules() if module is head)
    layer = Layer((path,), head)
    if layer.matches(kept):
        return
    # The first rule that matches decides.
    matching = [scheme for pattern, scheme in rules if layer.matches([pattern])]
    if matching and matching[0] is not None:
        raise ValueError(
            f"{path} shares its weight with the embedding, which vLLM keeps in 16 bits to look up "
            f"tokens: keep '{HEAD}' in quantization_ignore, or untie the model first."
        )


def check_storable(schemes: Mapping[str, QuantizationScheme], layers: Mapping[str, Layer]) -> None:
    """Raise `ValueError` for layers that their formats cannot store."""
    reasons = {}
    for name, scheme in schemes.items():
        reason = storage_obstacle(scheme.library_scheme.weights, layers[name].shape)
        if name.endswith(HEAD) and not scheme.heads:
            reason = "vLLM cannot load an output head in this format"
        if reason is not None:
            reasons[name] = reason
    if reasons:
        first, reason = next(iter(reasons.items()))
        count = f"{len(reasons)} of the {len(schemes)} layers"
        patterns = sorted({f"re:.*{name.rpartition('.')[2]}" for name in reasons})
        raise ValueError(
            f"{schemes[first].name} cannot quantize {count}, first {first}: {reason}. Choose "
            f"another format, or add {', '.join(map(repr, patterns))} to quantization_ignore "
            "(`--ignore` of commands that do not train) to keep them in full precision."
        )


def check_fused(schemes: Mapping[str, QuantizationScheme], layers: Iterable[str]) -> None:
    """Raise `ValueError` if an engine fuses layers of several formats."""
    for group in fused_groups(layers):
        firsts: dict[str, str] = {}  # the first layer in each format
        for layer in group:
            name = schemes[layer].name if layer in schemes else "16 bits"
            firsts.setdefault(name, layer)
        if len(firsts) > 1:
            more = ", ..." if len(group) > 3 else ""
            found = ", ".join(f"{layer} is in {name}" for name, layer in firsts.items())
            raise ValueError(
                f"vLLM fuses {', '.join(group[:3])}{more} into one layer, but {found}: give them "
                "one format in rollout_quantization (--scheme) and quantization_ignore (--ignore)."
            )
