"""The formats that a command compares: those that were named, or all that this machine and the model allow."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_qurl.quantization.scheme import QuantizationScheme


def candidates(names: Sequence[str] | None) -> list[QuantizationScheme]:
    """The formats of these names; without any, those that this machine has kernels for."""
    from trl_qurl.quantization.formats import available_schemes, get_scheme

    return available_schemes() if names is None else [get_scheme(name) for name in names]


def label(name: str) -> str:
    """A format as people write it; what follows its name, as in `int8+LoRA`, stays."""
    return "16 bits" if name == "none" else re.sub(r"^\w+", lambda scheme: scheme[0].upper(), name)


def fitting_formats(
    model: Any, names: Sequence[str] | None, ignore: Sequence[str], say: Callable[[str], None]
) -> list[QuantizationScheme]:
    """The formats to compare. What was named must fit the model; what was not is left out with a line, if it does not.

    Args:
        model: A transformers model; its weights are not needed.
        names: Those that were named, if any were.
        ignore: Modules kept in full precision.
        say: Called with a line for each format that is left out.

    Raises:
        ValueError: If a format that was named does not fit, or there is nothing to quantize.
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
