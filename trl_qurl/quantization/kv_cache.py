"""The engine's key-value cache, which stays in 16 bits.

vLLM's FP8 cache has scales for keys and values. None are made for new weights, so each sync would leave 1.0, or those
of other weights.
"""

UNQUANTIZED_CACHES = ("auto", "float16", "bfloat16")
"""Values of vLLM's `kv_cache_dtype` that round nothing; `auto` is the dtype of the model."""


def check_kv_cache(dtype: str, setting: str) -> None:
    """Raise `ValueError` for a quantized cache; `setting` is what the user wrote it to."""
    if dtype not in UNQUANTIZED_CACHES:
        raise ValueError(
            f"{setting} is {dtype!r}, which quantizes the key-value cache with scales that no sync brings up to date: "
            f"use one of {', '.join(map(repr, UNQUANTIZED_CACHES))}."
        )
