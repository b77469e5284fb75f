"""Which layer is stored in which format: the plan of one model's quantized checkpoint."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from trl_qurl.quantization.checks.plan import (
    check_fused,
    check_head,
    check_patterns,
    check_storable,
    check_useful,
)
from trl_qurl.quantization.formats import EXAMPLE, SCHEMES, UNQUANTIZED, get_scheme
from trl_qurl.quantization.layers import REST, Layer, ignored_modules, model_layers
from trl_qurl.quantization.scheme import HEAD, LINEAR, QuantizationScheme, Rule

Formats = str | Mapping[str, str | None] | None
"""A format for all layers, formats by pattern (the first match wins), or `None` for 16 bits."""


@dataclass(frozen=True)
class QuantizationPlan:
    """The format of each quantized layer of a model; an empty plan leaves all layers in 16 bits."""

    # By layer, as named in the checkpoint.
    schemes: Mapping[str, QuantizationScheme] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()  # patterns of modules in 16 bits, which come before all targets
    # Patterns by format.
    targets: Mapping[QuantizationScheme, Sequence[str]] = field(default_factory=dict)
    formats: Formats = None  # as users write it

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
            check_useful(model, layers, pattern, True, "quantization_ignore (--ignore)")
    check_head(model, kept, rules)
    plan = _match(model, layers, kept, rules)
    if not plan.schemes:
        raise ValueError(
            f"quantization_ignore={ignore} matches all {len(layers)} linear layers of "
            f"{type(model).__name__}, so there is nothing to quantize: narrow the patterns, or set "
            "rollout_quantization=None."
        )
    check_storable(plan.schemes, layers)
    check_fused(plan.schemes, layers)
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
        matched = [name for name, layer in layers.items() if layer.matches([pattern])]
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
            check_useful(model, layers, pattern, scheme is None, "rollout_quantization (--scheme)")
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
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(
                f"{setting} is {value!r}, not a JSON object such as {EXAMPLE}: {error}."
            ) from None
    if not isinstance(value, Mapping):
        return _read_format(value, setting)
    check_patterns(list(value), setting)
    formats = {
        pattern: _read_format(name, setting) or UNQUANTIZED for pattern, name in value.items()
    }
    return formats if schemes_of(formats) else None


def _read_format(value: Any, setting: str) -> str | None:
    if value is None or str(value).lower() == UNQUANTIZED:
        return None
    if isinstance(value, str):
        return get_scheme(value).name
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


def linear_targets(ignore: Sequence[str]) -> list[str]:
    """Return compressed-tensors' patterns for all linear layers.

    vLLM's output head is not a `Linear`.
    """
    if Layer((HEAD,), LINEAR).matches(ignore):
        return ["Linear"]
    return ["Linear", f"re:.*{HEAD}$"]
