"""A forward pass with the keys and values of a rounded cache, without an engine.

As in vLLM, all tokens are read from the cache, those of the prompt too. Queries stay exact.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from trl_qurl.lab.activations import fp8_per_token, int8_per_token, to_fp8

ATTENTION = "sdpa"

ROUNDINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp8": to_fp8,  # its scales are 1
    "fp8_per_token_head": fp8_per_token,
    "int8_per_token_head": int8_per_token,
}
"""By value of `kv_cache_dtype`: rounds keys or values, (B, heads, T, D)."""


@contextmanager
def rounded_cache(model: PreTrainedModel, cache: str) -> Iterator[None]:
    """Round keys and values of the model's attention inside the context.

    Raises `ValueError` for a model whose attention is not PyTorch's.
    """
    if model.config.get_text_config()._attn_implementation != ATTENTION:
        raise ValueError(
            f"--kv {cache} is simulated here, which needs a model with PyTorch's attention "
            f"({ATTENTION}): use a GPU."
        )
    attend = AttentionInterface()[ATTENTION]
    rounded = ROUNDINGS[cache]

    def attend_rounded(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> Any:
        return attend(module, query, rounded(key), rounded(value), *args, **options)

    AttentionInterface.register(cache, attend_rounded)
    AttentionMaskInterface.register(cache, sdpa_mask)
    model.set_attn_implementation(cache)
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION)
