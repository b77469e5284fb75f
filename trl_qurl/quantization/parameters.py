"""Parameters that a launcher keeps in parts."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from transformers.integrations import is_deepspeed_zero3_enabled


def whole(parameters: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Parameters that ZeRO-3 keeps in parts are whole inside the block, and what is done to them there is kept."""
    if not is_deepspeed_zero3_enabled():
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0)
