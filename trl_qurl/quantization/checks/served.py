"""What a server must have started from: each tensor's shape, and the format of its layer."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trl_qurl.quantization.scheme import LINEAR, QuantizationScheme, served_as


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
