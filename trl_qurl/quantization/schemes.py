"""The 8-bit formats a rollout can run in, as data.

A scheme says how one weight matrix becomes codes and scales, and which compressed-tensors preset tells vLLM to
multiply with them. Both presets of the paper quantize weights per output channel and activations per token (at run
time, by the engine): nothing has to be calibrated. The KV cache and `lm_head` stay in full precision (Sec. 5 of arXiv
2602.13953).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class QuantizationScheme:
    """
    How a weight matrix is rounded, and what the engine is told about it.

    Attributes:
        name: What users write (`rollout_quantization="int8"`).
        preset: The compressed-tensors preset with the same meaning, which llm-compressor applies and vLLM executes.
        checkpoint_format: compressed-tensors' name for the way codes are stored.
        dtype: Type of the stored codes.
        code_min: Smallest code.
        code_max: Largest code.
        rounds: Whether codes are integers; floating-point codes are rounded by the cast to `dtype`.
    """

    name: str
    preset: str
    checkpoint_format: str
    dtype: torch.dtype
    code_min: float
    code_max: float
    rounds: bool

    @property
    def half_range(self) -> float:
        """Half the width of the code range: an output channel's scale is absmax / `half_range`."""
        return (self.code_max - self.code_min) / 2


SCHEMES: dict[str, QuantizationScheme] = {
    scheme.name: scheme
    for scheme in (
        # llm-compressor spreads absmax over all 255 steps of [-128, 127]: half the range is 127.5, not 127.
        QuantizationScheme("int8", "W8A8", "int-quantized", torch.int8, -128.0, 127.0, rounds=True),
        QuantizationScheme("fp8", "FP8_DYNAMIC", "float-quantized", torch.float8_e4m3fn, -448.0, 448.0, rounds=False),
    )
}
"""The formats by name."""


def get_scheme(name: str) -> QuantizationScheme:
    """
    Look a scheme up by name.

    Args:
        name: A name in `SCHEMES`.

    Returns:
        The scheme.

    Raises:
        ValueError: If there is no such scheme; the message lists those that exist.
    """
    if name not in SCHEMES:
        raise ValueError(
            f"Unknown quantization scheme {name!r}: choose one of {', '.join(map(repr, SCHEMES))}, or None for "
            "rollouts in BF16."
        )
    return SCHEMES[name]


def quantization_config(scheme: QuantizationScheme, ignore: Sequence[str]) -> dict[str, Any]:
    """
    The `quantization_config` entry of a checkpoint's `config.json`, by which vLLM knows the format.

    Args:
        scheme: Format of the quantized layers.
        ignore: Modules kept in full precision, in compressed-tensors' pattern syntax.

    Returns:
        A JSON-serialisable dictionary: what llm-compressor writes, less its notes about itself (version, observers).
    """
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, preset_name_to_scheme

    group = preset_name_to_scheme(scheme.preset, targets=["Linear"])
    group.format = scheme.checkpoint_format
    config = QuantizationConfig(
        config_groups={"group_0": group},
        ignore=list(ignore),
        format=scheme.checkpoint_format,
        quantization_status=QuantizationStatus.COMPRESSED,
    )
    return config.model_dump(mode="json")
