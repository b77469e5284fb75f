"""Which layer is stored in which format: the plan of one model's quantized checkpoint."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from torch import nn

from trl_qurl.quantization.checkpoint_form import plain_model
from trl_qurl.quantization.formats import EXAMPLE, SCHEMES, UNQUANTIZED, get_scheme
from trl_qurl.quantization.layers import Layer, fused_groups, ignored_modules, model_layers
from trl_qurl.quantization.scheme import HEAD, LINEAR, QuantizationScheme, served_as

Formats = str | Mapping[str, str | None] | None
"""A format for all layers, formats by pattern (the first that
matches wins), or `None` for 16 bits.
"""

REST = "*"
"""Pattern for all layers that are left. Other patterns are llm-compressor's: a name, `re:` and a
regular expression that matches the start of a name, or a class name."""


@dataclass(frozen=True)
class QuantizationPlan:
    """The format of each quantized layer of a model; an empty plan leaves all layers in 16 bits."""

    # by layer, as named in the checkpoint
    schemes: Mapping[str, QuantizationScheme] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()  # patterns of modules in 16 bits, which come before all targets
    # patterns by format
    targets: Mapping[QuantizationScheme, Sequence[str]] = field(default_factory=dict)
    formats: Formats = None  # as users write it

    @property
    def description(self) -> str:
        """The formats in a few words, for model cards."""
        counts = Counter(self.schemes.values())
        notes = {
            scheme: f"{count} layers: " if len(counts) > 1 else ""
            for scheme, count in counts.items()
        }
        return "; ".join(
            f"{note}{scheme.label}, {scheme.served_as}" for scheme, note in notes.items()
        )

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
            groups[f"group_{number}"] = group = preset_name_to_scheme(
                scheme.preset, targets=list(targets)
            )
            group.format = scheme.checkpoint_format
        stored = {scheme.checkpoint_format for scheme in self.targets}
        form = stored.pop() if len(stored) == 1 else CompressionFormat.mixed_precision.value
        status = {"ignore": list(self.ignore), "quantization_status": "compressed"}
        return QuantizationConfig(config_groups=groups, format=form, **status).model_dump(
            mode="json"
        )


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
    ignore, formats = [ignore] if isinstance(ignore, str) else list(ignore), read_formats(formats)
    check_patterns(ignore, "quantization_ignore")
    kept = ignored_modules(model, ignore)
    if formats is None:
        return QuantizationPlan(ignore=tuple(kept))
    rules, layers = read_rules(formats), model_layers(model)
    for pattern in ignore:
        if pattern != HEAD:  # the default; some models name their head otherwise
            _check_useful(model, layers, pattern, True, "quantization_ignore (--ignore)")
    _check_head(model, [*((pattern, None) for pattern in kept), *rules])
    chosen: dict[str, QuantizationScheme | None] = {
        name: None for name in layers if layers[name].matches(kept)
    }
    targets: dict[QuantizationScheme, list[str]] = {}
    for number, (pattern, scheme) in enumerate(rules):
        matched = [
            name for name, layer in layers.items() if pattern == REST or layer.matches([pattern])
        ]
        own = [name for name in matched if name not in chosen]
        # Libraries order patterns that overlap in other ways, and vLLM matches them with names of
        # fused layers first.
        patterns = (
            own if any(chosen.get(name) not in (None, scheme) for name in matched) else [pattern]
        )
        if pattern == REST:
            patterns = linear_targets([*kept, *(earlier for earlier, _ in rules[:number])])
        elif not own:
            _check_useful(model, layers, pattern, scheme is None, "rollout_quantization (--scheme)")
        chosen |= dict.fromkeys(own, scheme)
        if scheme is not None and own:
            targets.setdefault(scheme, []).extend(patterns)
        elif pattern != REST:
            kept.extend(patterns)
    schemes = {name: scheme for name, scheme in chosen.items() if scheme is not None}
    if not schemes:
        raise ValueError(
            f"quantization_ignore={ignore} matches all {len(layers)} linear layers of "
            f"{type(model).__name__}, so there is nothing to quantize: narrow the patterns, or set "
            "rollout_quantization=None."
        )
    _check_storable(schemes, layers)
    _check_fused(schemes, layers)
    return QuantizationPlan(schemes, tuple(kept), targets, formats)


def read_formats(value: Any, setting: str = "rollout_quantization") -> str | dict[str, str] | None:
    """Check formats from Python, YAML or a command line (a JSON object if several); `ValueError` if
    wrong.
    """
    try:
        if isinstance(value, str) and value.lstrip().startswith("{"):
            if len(pairs := json.loads(value, object_pairs_hook=list)) > len(dict(pairs)):
                raise ValueError("a pattern is there twice")
            value = dict(pairs)
    except ValueError as error:
        raise ValueError(
            f"{setting} is {value!r}, not a JSON object such as {EXAMPLE}: {error}."
        ) from None
    if (
        isinstance(value, Mapping)
        and value
        and not any(isinstance(name, Mapping) for name in value.values())
    ):
        check_patterns(list(value), setting)
        formats = {
            pattern: format_name(read_formats(name, setting)) for pattern, name in value.items()
        }
        if schemes_of(formats):
            return formats
    if not isinstance(value, str | None):  # YAML reads `off` as False
        names = f"{UNQUANTIZED!r}, one of {', '.join(SCHEMES)}"
        raise ValueError(
            f"{setting} is {value!r}: write {names}, or formats by pattern such as {EXAMPLE}."
        )
    return None if value is None or value.lower() == UNQUANTIZED else get_scheme(value).name


def read_rules(formats: Formats) -> list[tuple[str, QuantizationScheme | None]]:
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
    """Raise `ValueError` for a pattern that is not text, or starts with `re:` but is not a regular
    expression.
    """
    if not isinstance(patterns, list | tuple):
        raise ValueError(f"{name} is {patterns!r}, but must be a list of patterns, or [] for none.")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(
                f"{name} has the pattern {pattern!r}, which is not text: write it in quotes."
            )
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise ValueError(
                f"{name} has {pattern!r}, which is not a regular expression: {error}."
            ) from None


def linear_targets(ignore: Sequence[str]) -> list[str]:
    """Return compressed-tensors' patterns for all linear layers; vLLM's output head is not a
    `Linear`.
    """
    return ["Linear"] if Layer((HEAD,), LINEAR).matches(ignore) else ["Linear", f"re:.*{HEAD}$"]


def fingerprint(
    plan: Mapping[str, QuantizationScheme | str], shapes: Mapping[str, Sequence[int]]
) -> dict[str, str]:
    """Describe each tensor of a checkpoint: what a server must have started from; empty if nothing
    is quantized.

    `plan` has the format of each layer, or its description (`served_as`), and `shapes` are those of
    the tensors.
    """
    forms = {
        layer: form if isinstance(form, str) else form.served_as for layer, form in plan.items()
    }
    return {
        name: f"{forms.get(name.rpartition('.')[0], '16 bits')}, shape {list(shape)}"
        for name, shape in shapes.items()
        if forms
    }


def stored_formats(config: Mapping[str, Any], tensors: Iterable[str]) -> dict[str, str]:
    """Describe the format of each layer of a checkpoint, from its `quantization_config` and names
    of tensors.
    """
    from compressed_tensors.utils import match_targets

    groups = config["config_groups"].values()
    targets = {
        target: served_as(group, config.get("format"))
        for group in groups
        for target in group["targets"]
    }
    layers = [
        name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")
    ]
    return {layer: targets[match_targets(layer, LINEAR, targets)[0]] for layer in layers}


def _check_useful(
    model: Any, layers: Mapping[str, Layer], pattern: str, is_kept: bool, setting: str
) -> None:
    """Raise `ValueError` for a pattern that decides about no layer; one for 16 bits may match any
    module.
    """
    matched = any(layer.matches([pattern]) for layer in layers.values())
    modules = plain_model(model).named_modules()
    if is_kept and (
        matched or any(Layer((path,), module).matches([pattern]) for path, module in modules)
    ):
        return
    near = *get_close_matches(pattern, layers, 1), *layers
    reason = f"no layer of {type(plain_model(model)).__name__}: use names such as {near[0]!r}"
    if matched:
        reason = "only layers of earlier patterns, or of quantization_ignore: put it before those"
    raise ValueError(f"{setting} has the pattern {pattern!r}, which matches {reason}.")


def _check_head(model: Any, rules: Iterable[tuple[str, QuantizationScheme | None]]) -> None:
    """Raise `ValueError` if an output head to quantize shares its weight with the embedding."""
    base = plain_model(model)
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    if not isinstance(head, nn.Linear) or head.weight is not embedding.weight:
        return
    path = next(path for path, module in base.named_modules() if module is head)
    matching = (
        scheme
        for pattern, scheme in rules
        if pattern == REST or Layer((path,), head).matches([pattern])
    )
    if next(matching, None) is not None:
        raise ValueError(
            f"{path} shares its weight with the embedding, which vLLM keeps in 16 bits to look up "
            f"tokens: keep '{HEAD}' in quantization_ignore, or untie the model first."
        )


def _check_storable(schemes: Mapping[str, QuantizationScheme], layers: Mapping[str, Layer]) -> None:
    """Raise `ValueError` for layers that their formats cannot store."""
    no_head = "vLLM cannot load an output head in this format"
    reasons = {
        name: no_head
        if name.endswith(HEAD) and not scheme.heads
        else scheme.refusal(layers[name].shape)
        for name, scheme in schemes.items()
    }
    if reasons := {name: reason for name, reason in reasons.items() if reason}:
        first, reason = next(iter(reasons.items()))
        patterns = sorted({f"re:.*{name.rpartition('.')[2]}" for name in reasons})
        raise ValueError(
            f"{schemes[first].name} cannot quantize {len(reasons)} of the {len(schemes)} layers, "
            f"first {first}: {reason}. Choose another format, or add "
            f"{', '.join(map(repr, patterns))} to quantization_ignore (`--ignore` on the command "
            "line) to keep them in full precision."
        )


def _check_fused(schemes: Mapping[str, QuantizationScheme], layers: Iterable[str]) -> None:
    """Raise `ValueError` if an engine fuses layers of several formats."""
    for group in fused_groups(layers):
        names = {layer: schemes[layer].name if layer in schemes else "16 bits" for layer in group}
        # first layer in each format
        firsts = {name: layer for layer, name in reversed(names.items())}
        if len(firsts) > 1:
            raise ValueError(
                f"vLLM fuses {', '.join(group[:3])}{', ...' * (len(group) > 3)} into one layer, "
                f"but {', '.join(f'{layer} is in {name}' for name, layer in firsts.items())}: give "
                "them one format in rollout_quantization (--scheme) and quantization_ignore "
                "(--ignore)."
            )
