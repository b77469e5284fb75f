"""A tied output head that keeps its first weights, on a CPU (report 11).

It multiplies with a packed copy of the embedding. A reload packs the embedding again, but not the
head, so without this repair logits come from the weights that the engine started with.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

REPORTS = (11,)
SEEN_IN = "vllm 0.32"
UNNECESSARY_FROM = None


@contextmanager
def around_reload(model: torch.nn.Module) -> Iterator[None]:
    """Give a tied head the embedding's packed copy after a reload inside the block."""
    yield
    packed = {}  # by weight
    for layer in model.modules():
        if type(layer) is VocabParallelEmbedding and hasattr(layer, "cpu_linear"):
            packed[id(layer.weight)] = layer.cpu_linear
    for layer in model.modules():
        if not isinstance(layer, ParallelLMHead):
            continue
        if not isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
            continue
        if id(layer.weight) in packed:
            layer.cpu_linear = packed[id(layer.weight)]
