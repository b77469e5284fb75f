"""The formats that a command compares: the requested ones, or all that this machine and the model support."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_qurl.quantization.scheme import QuantizationScheme


def candidates(names: Sequence[str] | None) -> list[QuantizationScheme]:
    """Return the named formats; without names, all with kernels on this machine."""
    from trl_qurl.quantization.formats import available_schemes, get_scheme

    return available_schemes() if names is None else [get_scheme(name) for name in names]


def label(name: str) -> str:
    """Return a format's display name, keeping suffixes as in `int8+LoRA`."""
    return "16 bits" if name == "none" else re.sub(r"^\w+", lambda scheme: scheme[0].upper(), name)


def fitting_formats(
    model: Any, names: Sequence[str] | None, ignore: Sequence[str], say: Callable[[str], None]
) -> list[QuantizationScheme]:
    """Return the formats to compare. Without `names`, formats that do not fit the model are left out with a message.

    Args:
        model: A transformers model; its weights are not needed.
        names: Requested formats, which must all fit the model; `None` for all that do.
        ignore: Modules to keep in full precision.
        say: Called with a message for each format that is left out.

    Raises:
        ValueError: If a requested format does not fit, or there is nothing to quantize.
    """
    from trl_qurl.quantization.layers import quantized_layer_names, why_unfit

    fitting = []
    for scheme in candidates(names):
        if names is None and (reason := why_unfit(model, ignore, scheme)):
            say(f"{scheme.label} is left out: it {reason}.")
        else:
            quantized_layer_names(model, ignore, scheme)
            fitting.append(scheme)
    return fitting
