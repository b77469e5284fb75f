"""The engine's key-value cache: in 16 bits, or in FP8 (E4M3) with scales that are always 1.

Scales fitted to keys and values would change with the weights, and vLLM computes none after a sync. Scales of 1 work
for any weights: E4M3 is a floating-point format, so its relative error is the same for all keys and values between
2^-6 and 448. Larger ones are clamped to 448.
"""

from typing import Any

import torch
from transformers import DynamicCache

UNQUANTIZED_CACHES = ("auto", "float16", "bfloat16")
"""Values of vLLM's `kv_cache_dtype` without rounding; `auto` is the dtype of the model."""

FP8_CACHES = ("fp8", "fp8_e4m3")
"""Values for a cache in E4M3. Our checkpoints have no scales for it, so vLLM uses 1 at startup and after a reload."""


def check_kv_cache(dtype: str, setting: str) -> None:
    """Raise `ValueError` for a cache in any other format; `setting` is where the user set it."""
    if dtype not in UNQUANTIZED_CACHES + FP8_CACHES:
        raise ValueError(
            f"{setting} is {dtype!r}, a format of the key-value cache that sync checks do not support: use one of "
            f"{', '.join(map(repr, UNQUANTIZED_CACHES + FP8_CACHES))}."
        )


class FP8Cache(DynamicCache):
    """[`transformers.DynamicCache`] that rounds keys and values as the engine's FP8 cache does."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Store rounded keys and values, and return them to attention."""
        return super().update(round_to_fp8(keys), round_to_fp8(values), *args, **kwargs)


def round_to_fp8(tensor: torch.Tensor) -> torch.Tensor:
    """Round to E4M3 with a scale of 1, in the tensor's own dtype: to nearest, but toward zero on CPUs."""
    codes = tensor.clamp(-448, 448).to(torch.float8_e4m3fn)
    if tensor.device.type == "cpu":  # vLLM's kernel rounds toward zero there; codes are ordered by magnitude
        is_above = codes.to(tensor.dtype).abs() > tensor.abs()
        codes = (codes.view(torch.uint8) - is_above.to(torch.uint8)).view(torch.float8_e4m3fn)
    return codes.to(tensor.dtype)
