"""Scales of a quantized key-value cache that sleep mode discards, on a GPU (report 9).

vLLM saves only buffers before it sleeps, and in 0.31 these are parameters. No checkpoint of ours
contains them, so without this repair outputs are noise after an engine has slept.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

REPORTS = (9,)
SEEN_IN = "vllm 0.31"
UNNECESSARY_FROM = "0.32"

CACHE_SCALES = ("_q_scale", "_k_scale", "_v_scale")


@contextmanager
def around_reload(model: torch.nn.Module) -> Iterator[None]:
    """Set the scales to 1, as in a fresh engine, after a reload inside the block."""
    yield
    for path, parameter in model.named_parameters():
        if path.rpartition(".")[2] in CACHE_SCALES:
            parameter.data.fill_(1.0)
