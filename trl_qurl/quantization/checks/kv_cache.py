"""Formats of the key-value cache, and models that they may not fit."""

from torch import nn

from trl_qurl.quantization.formats import CACHES, TOKEN_CACHES, gpu_capability

COARSE_CACHES = ("fp8", "int8_per_token_head")
"""Those in which one large key ruins the others of its token and head, or is cut off."""

LARGE_KEYS = (
    "kv_cache_dtype={!r} may be too coarse: this model's keys have biases and no norm, as "
    "Qwen2.5's, and a few may be hundreds wide. Leave kv_cache_dtype out, or try "
    "'fp8_per_token_head' (on a GPU), once `trl-qurl mismatch --kv` recommends it."
)


def check_kv_cache(dtype: str, setting: str) -> None:
    """Raise `ValueError` for a key-value cache that `CACHES` or this device lacks.

    `setting` is where it was set.
    """
    has_gpu = gpu_capability() is not None
    here = [cache for cache in CACHES if has_gpu or cache not in TOKEN_CACHES]
    if dtype not in here:
        raise ValueError(
            f"{setting} is {dtype!r}, a format of the key-value cache that syncs do not support "
            f"here: use one of {', '.join(map(repr, here))}."
        )


def has_large_keys(model: nn.Module) -> bool:
    """Return whether a model's keys may be hundreds wide: they have biases, and no norm."""
    names = [name for name, _ in model.named_parameters()]
    has_norm = any("k_norm." in name for name in names)
    return not has_norm and any("k_proj." in name and name.endswith("bias") for name in names)
