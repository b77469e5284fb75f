"""Access to parameters that ZeRO-3 shards over processes."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from transformers.integrations import is_deepspeed_zero3_enabled


def whole(parameters: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Gather parameters that ZeRO-3 shards, for the duration of a context that may change them."""
    if not is_deepspeed_zero3_enabled():
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0)
