"""Formats for rollouts, by name.

To add one here, add an entry to `FORMATS`. To add one from another package, declare it as an entry
point of the group `trl_qurl.quantization.formats`, or call `register_scheme`.
"""

from difflib import get_close_matches
from importlib.metadata import entry_points

import torch

from trl_qurl.quantization.scheme import KernelFault, QuantizationScheme

UNQUANTIZED = "none"
"""Name for "no quantization" on the command line and in files. In Python it is `None`."""

EXAMPLE = '{"re:.*down_proj": "w8a16", "*": "int8"}'
"""Formats by pattern, for error messages and help."""

TOKEN_CACHES = ("int8_per_token_head", "fp8_per_token_head")
"""Caches with a scale per token and head, stored with the values.

Only vLLM's Triton attention for GPUs has them."""

CACHES = ("auto", "float16", "bfloat16", "fp8", *TOKEN_CACHES)
"""Values of `kv_cache_dtype` that stay right after a sync; `auto` is the dtype of the model. The
scales of `fp8`, which is E4M3, are always 1: scales fitted to keys and values would change with the
weights, and vLLM computes none after a sync."""


def register_scheme(scheme: QuantizationScheme) -> None:
    """Make a scheme available by name.

    Args:
        scheme: The scheme.

    Raises:
        ValueError: If the name is taken or reserved for no quantization.
    """
    if scheme.name in (UNQUANTIZED, *SCHEMES):
        raise ValueError(
            f"A quantization scheme named {scheme.name!r} is already registered: choose another "
            "name."
        )
    SCHEMES[scheme.name] = scheme


def get_scheme(name: str) -> QuantizationScheme:
    """Look up a scheme by name.

    Args:
        name: A name in `SCHEMES`.

    Returns:
        The scheme.

    Raises:
        ValueError: If the scheme is unknown; the message lists the valid names.
    """
    if name not in SCHEMES:
        near = get_close_matches(name.lower(), SCHEMES, 1)
        if "4" in name:  # as in "int4" and "4bit"
            near = ["w4a16"]
        guess = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(
            f"Unknown quantization scheme {name!r}{guess} Choose one of "
            f"{', '.join(map(repr, SCHEMES))}, or None ({UNQUANTIZED!r} on the command line) for "
            "unquantized rollouts."
        )
    return SCHEMES[name]


def gpu_capability() -> tuple[int, int] | None:
    """Return the compute capability of the current GPU, major and minor; `None` without CUDA."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability()


def emulates_bfloat16() -> bool:
    """Return whether the GPU is older than Ampere; torch counts its bfloat16 as supported."""
    capability = gpu_capability()
    return capability is not None and capability < (8, 0)


FORMATS = (
    QuantizationScheme(
        name="int8",
        preset="W8A8",
        checkpoint_format="int-quantized",
        lowest_gpu=(7, 5),  # Turing and later
        cpus="avx2",
        is_smoothed=True,
        # On Blackwell and later, vLLM's CUTLASS kernels support only FP8. The one for INT8 is
        # selected, and fails when it runs.
        kernel_fault=KernelFault((10, 0), ("CutlassInt8ScaledMMLinearKernel",)),
    ),
    QuantizationScheme(
        name="fp8",
        preset="FP8_DYNAMIC",
        checkpoint_format="float-quantized",
        lowest_gpu=(8, 9),  # Ada and later
        cpus=None,  # emulated there: minutes per rollout
    ),
    QuantizationScheme(
        name="fp8_block",
        preset="FP8_BLOCK",
        checkpoint_format="float-quantized",
        lowest_gpu=(9, 0),  # Hopper and later; on older GPUs vLLM's kernel leaves activations exact
        # Kernels for CPUs need AMX, and leave activations exact or use one scale per token.
        cpus=None,
        heads=False,  # vLLM's loader of heads requires a scale per token of the vocabulary
        # DeepGEMM rounds the weights again, to scales that are powers of two, and activations
        # with such scales.
        kernel_fault=KernelFault(
            (9, 0),
            ("FlashInferFp8DeepGEMMDynamicBlockScaledKernel", "DeepGemmFp8BlockScaledMMKernel"),
        ),
    ),
    QuantizationScheme(
        name="w4a16",
        preset="W4A16",
        checkpoint_format="pack-quantized",
        lowest_gpu=(7, 5),  # Turing and later
        cpus="avx512_f",
    ),
    QuantizationScheme(
        name="w8a16",
        preset="W8A16",
        checkpoint_format="pack-quantized",
        lowest_gpu=(7, 5),
        cpus=None,  # vLLM's CPU kernel for packed weights supports only four bits
    ),
)

SCHEMES = {scheme.name: scheme for scheme in FORMATS}
"""All formats by name, with those that are registered later."""

for _entry_point in entry_points(group=__name__):
    register_scheme(_entry_point.load())
