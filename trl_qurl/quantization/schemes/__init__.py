"""The formats a rollout can run in, by name.

To add one here, write a file in this folder and register it below. To add one from another package, declare it as an
entry point of the group `trl_qurl.quantization.schemes`, or call `register_scheme`.
"""

from difflib import get_close_matches
from importlib.metadata import entry_points

import torch

from trl_qurl.quantization.schemes.blockwise import FP8_BLOCK
from trl_qurl.quantization.schemes.channelwise import FP8, INT8
from trl_qurl.quantization.schemes.groupwise import W4A16, W8A16
from trl_qurl.quantization.schemes.microscaling import MXFP8
from trl_qurl.quantization.schemes.nvfp4 import NVFP4A16
from trl_qurl.quantization.schemes.scheme import KernelFault, QuantizationScheme, StoredTensor

__all__ = [
    "SCHEMES",
    "UNQUANTIZED",
    "KernelFault",
    "QuantizationScheme",
    "StoredTensor",
    "available_schemes",
    "gpu_capability",
    "get_scheme",
    "parse_scheme",
    "register_scheme",
]

UNQUANTIZED = "none"
"""How "no quantization" is written on the command line and in files. In Python it is `None`."""

SCHEMES: dict[str, QuantizationScheme] = {}
"""The formats by name."""


def register_scheme(scheme: QuantizationScheme) -> QuantizationScheme:
    """Make a scheme known by its name.

    Args:
        scheme: The scheme.

    Returns:
        The same scheme.

    Raises:
        ValueError: If the name is taken, or stands for no quantization.
    """
    if scheme.name in (UNQUANTIZED, *SCHEMES):
        raise ValueError(f"There already is a quantization scheme called {scheme.name!r}: choose another name.")
    SCHEMES[scheme.name] = scheme
    return scheme


def get_scheme(name: str) -> QuantizationScheme:
    """Look a scheme up by name.

    Args:
        name: A name in `SCHEMES`.

    Returns:
        The scheme.

    Raises:
        ValueError: If there is no such scheme; the message lists those that exist.
    """
    if name not in SCHEMES:
        near = get_close_matches(name, SCHEMES, 1)
        guess = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(
            f"Unknown quantization scheme {name!r}{guess} Choose one of {', '.join(map(repr, SCHEMES))}, or None "
            f"({UNQUANTIZED!r} on the command line) for rollouts that are not quantized."
        )
    return SCHEMES[name]


def parse_scheme(text: str | None) -> str | None:
    """Translate a scheme's name from the command line to Python.

    Args:
        text: A name in `SCHEMES`, or `"none"` in any case.

    Returns:
        The name; `None` for no quantization. An unknown name raises as in `get_scheme`.
    """
    return None if text is None or text.lower() == UNQUANTIZED else get_scheme(text).name


def available_schemes() -> list[QuantizationScheme]:
    """List the schemes that vLLM has kernels for on this machine.

    Returns:
        A part of `SCHEMES`.
    """
    return [scheme for scheme in SCHEMES.values() if scheme.runs_on(gpu_capability())]


def gpu_capability() -> tuple[int, int] | None:
    """Look up the compute capability of the current GPU.

    Returns:
        Major and minor version; `None` where there is no CUDA.
    """
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


for _scheme in (INT8, FP8, FP8_BLOCK, MXFP8, W4A16, W8A16, NVFP4A16):
    register_scheme(_scheme)
for _entry_point in entry_points(group=__name__):
    register_scheme(_entry_point.load())
