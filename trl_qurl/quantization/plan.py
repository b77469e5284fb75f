"""Which layer is stored in which format: the plan of one model's quantized checkpoint."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from torch import nn

from trl_qurl.quantization.checkpoint_form import plain_model
from trl_qurl.quantization.formats import EXAMPLE, SCHEMES, UNQUANTIZED, get_scheme
from trl_qurl.quantization.layers import Layer, fused_groups, ignored_modules, model_layers
from trl_qurl.quantization.scheme import HEAD, LINEAR, QuantizationScheme, served_as

Formats = str | Mapping[str, str | None] | None
"""A format for all layers, formats by pattern (the first match wins), or `None` for 16 bits."""

Rule = tuple[str, QuantizationScheme | None]
"""A pattern, and the format of the layers that it matches first; `None` is 16 bits."""

REST = "*"
"""Pattern for all layers that are left. Other patterns are llm-compressor's: a name, `re:` and a
regular expression that matches the start of a name, or a class name."""


@dataclass(frozen=True)
class QuantizationPlan:
    """The format of each quantized layer of a model; an empty plan leaves all layers in 16 bits."""

    # By layer, as named in the checkpoint.
    schemes: Mapping[str, QuantizationScheme] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()  # patterns of modules in 16 bits, which come before all targets
    # Patterns by format.
    targets: Mapping[QuantizationScheme, Sequence[str]] = field(default_factory=dict)
    formats: Formats = None  # as users write it

    @property
    def description(self) -> str:
        """The formats in a few words, for model cards."""
        counts = Counter(self.schemes.values())
        parts = []
        for scheme, count in counts.items():
            layers = f"{count} layers: " if len(counts) > 1 else ""
            parts.append(f"{layers}{scheme.label}, {scheme.served_as}")
        return "; ".join(parts)

    def quantization_config(self) -> dict[str, Any] | None:
        """Build what a checkpoint's `config.json` tells vLLM.

        Returns:
            The same as llm-compressor writes, without its metadata; `None` if nothing is quantized.
        """
        from compressed_tensors import CompressionFormat
        from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

        if not self.schemes:
            return None
        groups = {}
        for number, (scheme, targets) in enumerate(self.targets.items()):
            group = preset_name_to_scheme(scheme.preset, targets=list(targets))
            group.format = scheme.checkpoint_format
            groups[f"group_{number}"] = group
        stored = {scheme.checkpoint_format for scheme in self.targets}
        config = QuantizationConfig(
            config_groups=groups,
            format=stored.pop() if len(stored) == 1 else CompressionFormat.mixed_precision.value,
            ignore=list(self.ignore),
            quantization_status="compressed",
        )
        return config.model_dump(mode="json")


def make_plan(
    model: nn.Module, formats: Formats, ignore: Iterable[str] = ("lm_head",)
) -> QuantizationPlan:
    """Plan the formats of a model's linear layers and experts.

    Args:
        model: A transformers model, or a PEFT model around one. Adapters are left out: a sync
            merges them.
        formats: Name of a format, or names by pattern. Layers that no pattern matches stay in 16
            bits.
        ignore: Patterns of modules in 16 bits, which come before those of `formats`.

    Returns:
        The plan; an empty one if `formats` is `None`.

    Raises:
        ValueError: If a name or pattern is invalid or matches nothing, there is nothing to
            quantize, a format cannot store a layer, an engine fuses layers of several formats, or
            an output head to quantize shares its weight with the embedding.
    """
    ignore = [ignore] if isinstance(ignore, str) else list(ignore)
    formats = read_formats(formats)
    check_patterns(ignore, "quantization_ignore")
    kept = ignored_modules(model, ignore)
    if formats is None:
        return QuantizationPlan(ignore=tuple(kept))
    rules = read_rules(formats)
    layers = model_layers(model)
    for pattern in ignore:
        if pattern != HEAD:  # the default; some models name their head otherwise
            _check_useful(model, layers, pattern, True, "quantization_ignore (--ignore)")
    _check_head(model, kept, rules)
    plan = _match(model, layers, kept, rules)
    if not plan.schemes:
        raise ValueError(
            f"quantization_ignore={ignore} matches all {len(layers)} linear layers of "
            f"{type(model).__name__}, so there is nothing to quantize: narrow the patterns, or set "
            "rollout_quantization=None."
        )
    _check_storable(plan.schemes, layers)
    _check_fused(plan.schemes, layers)
    return replace(plan, formats=formats)


def _match(
    model: nn.Module, layers: Mapping[str, Layer], kept: Sequence[str], rules: Sequence[Rule]
) -> QuantizationPlan:
    """Give each layer the format of the first rule that matches it, unless a `kept` pattern does.

    Raises `ValueError` for a rule that decides about no layer.
    """
    chosen: dict[str, QuantizationScheme | None] = {
        name: None for name, layer in layers.items() if layer.matches(kept)
    }
    targets: dict[QuantizationScheme, list[str]] = {}
    ignore = list(kept)
    earlier: list[str] = []
    for pattern, scheme in rules:
        matched = [
            name for name, layer in layers.items() if pattern == REST or layer.matches([pattern])
        ]
        own = [name for name in matched if name not in chosen]
        if pattern == REST:
            patterns = linear_targets([*ignore, *earlier])
        elif any(chosen.get(name) not in (None, scheme) for name in matched):
            # Libraries order patterns that overlap in other ways, and vLLM matches them with names
            # of fused layers first. So name the layers instead.
            patterns = own
        else:
            patterns = [pattern]
        if pattern != REST and not own:
            _check_useful(model, layers, pattern, scheme is None, "rollout_quantization (--scheme)")
        chosen |= dict.fromkeys(own, scheme)
        if scheme is not None and own:
            targets.setdefault(scheme, []).extend(patterns)
        elif pattern != REST:
            ignore.extend(patterns)
        earlier.append(pattern)
    schemes = {name: scheme for name, scheme in chosen.items() if scheme is not None}
    return QuantizationPlan(schemes, tuple(ignore), targets)


def read_formats(value: Any, setting: str = "rollout_quantization") -> str | dict[str, str] | None:
    """Check formats from Python, YAML or a command line, where several are a JSON object.

    Raises `ValueError` if they are wrong.
    """
    if value is None:
        return None
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _parse_formats(value, setting)
    if isinstance(value, str):
        return None if value.lower() == UNQUANTIZED else get_scheme(value).name
    is_nested = isinstance(value, Mapping) and any(
        isinstance(name, Mapping) for name in value.values()
    )
    if isinstance(value, Mapping) and not is_nested:
        check_patterns(list(value), setting)
        formats = {
            pattern: format_name(read_formats(name, setting)) for pattern, name in value.items()
        }
        if schemes_of(formats):
            return formats
    # For example, YAML reads `off` as False.
    raise ValueError(
        f"{setting} is {value!r}: write {UNQUANTIZED!r}, one of {', '.join(SCHEMES)}, or formats "
        f"by pattern such as {EXAMPLE}."
    )


def require_formats(value: Any, setting: str) -> str | dict[str, str]:
    """Return formats as `read_formats` does; raise `ValueError` if they quantize nothing."""
    formats = read_formats(value, setting)
    if formats is None:
        raise ValueError(
            f"{setting} is {value!r}, which quantizes nothing: choose one of {', '.join(SCHEMES)}."
        )
    return formats


def _parse_formats(text: str, setting: str) -> dict[str, Any]:
    try:
        pairs = json.loads(text, object_pairs_hook=list)
        formats = dict(pairs)
        if len(formats) < len(pairs):
            raise ValueError("a pattern is there twice")
    except ValueError as error:
        raise ValueError(
            f"{setting} is {text!r}, not a JSON object such as {EXAMPLE}: {error}."
        ) from None
    return formats


def read_rules(formats: Formats) -> list[Rule]:
    """Return patterns and their formats in order; `None` as a format stands for 16 bits."""
    by_pattern = formats if isinstance(formats, Mapping) else {REST: formats}
    return [(pattern, SCHEMES.get(name or UNQUANTIZED)) for pattern, name in by_pattern.items()]


def schemes_of(formats: Formats) -> list[QuantizationScheme]:
    """Return the formats that are named, once each, without 16 bits."""
    return list(dict.fromkeys(scheme for _, scheme in read_rules(formats) if scheme is not None))


def format_name(formats: Formats) -> str:
    """Return a short name for directories and tables: `int8`, or `w8a16-int8`."""
    return "-".join(scheme.name for scheme in schemes_of(formats)) or UNQUANTIZED


def check_patterns(patterns: Any, name: str) -> None:
    """Raise `ValueError` for a pattern that is no text, or no regular expression after `re:`."""
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
                f"{name} has {pattern!r}, which is not a regular expression: {error}."
            ) from None


def linear_targets(ignore: Sequence[str]) -> list[str]:
    """Return compressed-tensors' patterns for all linear layers.

    vLLM's output head is not a `Linear`.
    """
    if Layer((HEAD,), LINEAR).matches(ignore):
        return ["Linear"]
    return ["Linear", f"re:.*{HEAD}$"]


def fingerprint(
    plan: Mapping[str, QuantizationScheme | str], shapes: Mapping[str, Sequence[int]]
) -> dict[str, str]:
    """Describe each tensor of a checkpoint, which a server must have started from.

    `plan` has the format of each layer, or its description (`served_as`), and `shapes` are those of
    the tensors. The result is empty if nothing is quantized.
    """
    if not plan:
        return {}
    result = {}
    for name, shape in shapes.items():
        form = plan.get(name.rpartition(".")[0], "16 bits")
        if isinstance(form, QuantizationScheme):
            form = form.served_as
        result[name] = f"{form}, shape {list(shape)}"
    return result


def stored_formats(config: Mapping[str, Any], tensors: Iterable[str]) -> dict[str, str]:
    """Describe the format of each quantized layer of a checkpoint (`served_as`).

    `config` is its `quantization_config`, and `tensors` are the names of its tensors.
    """
    from compressed_tensors.utils import match_targets

    targets: dict[str, str] = {}
    for group in config["config_groups"].values():
        targets |= dict.fromkeys(group["targets"], served_as(group, config.get("format")))
    stored = {}
    for name in tensors:
        layer = name.removesuffix(".weight_scale")
        if layer != name:
            first = match_targets(layer, LINEAR, targets)[0]
            stored[layer] = targets[first]
    return stored


def _check_useful(
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


def _check_head(model: nn.Module, kept: Sequence[str], rules: Sequence[Rule]) -> None:
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
    matching = [scheme for pattern, scheme in rules if pattern == REST or layer.matches([pattern])]
    if matching and matching[0] is not None:
        raise ValueError(
            f"{path} shares its weight with the embedding, which vLLM keeps in 16 bits to look up "
            f"tokens: keep '{HEAD}' in quantization_ignore, or untie the model first."
        )


def _check_storable(schemes: Mapping[str, QuantizationScheme], layers: Mapping[str, Layer]) -> None:
    """Raise `ValueError` for layers that their formats cannot store."""
    reasons = {}
    for name, scheme in schemes.items():
        reason = scheme.refusal(layers[name].shape)
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
            "(`--ignore` on the command line) to keep them in full precision."
        )


def _check_fused(schemes: Mapping[str, QuantizationScheme], layers: Iterable[str]) -> None:
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
