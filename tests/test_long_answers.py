"""The memory of activations in docs/eight-gpus.md: the formula against torch, the table against the
formula.
"""

import pytest
import torch
from documents import ROOT, rows
from transformers import Qwen2Config, Qwen2ForCausalLM

SHAPES = {
    "0.5B": (896, 4864, 24, 128),
    "1.5B": (1536, 8960, 28, 256),
    "3B": (2048, 11008, 36, 256),
    "7B": (3584, 18944, 28, 512),
    "14B": (5120, 13824, 48, 1024),
    "32B": (5120, 27648, 64, 1024),
}
"""Qwen2.5's hidden and MLP size, layers, and width of keys."""


def activations(tokens: int, hidden: int, inner: int, layers: int) -> int:
    """The page's formula, in bytes."""
    return tokens * (4 * hidden * layers + 32 * hidden + 8 * inner)


def kept_bytes(layers: int, checkpointing: bool) -> float:
    """Return how many bytes per token torch keeps for a backward pass."""
    config = Qwen2Config(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model = Qwen2ForCausalLM(config).model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    sizes = []
    for tokens in (128, 256):  # autocast's copies of weights cancel
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, kept: dict = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16):
            model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
    return (sizes[1] - sizes[0]) / 128


def test_torch_keeps_as_much_as_the_formula_says():
    checkpoint = kept_bytes(4, True) - kept_bytes(3, True)
    layer = kept_bytes(4, False) - kept_bytes(3, False)
    assert checkpoint == activations(1, 256, 0, 1) - activations(1, 256, 0, 0)
    assert layer == pytest.approx(activations(1, 256, 1024, 0), rel=0.02)


def test_the_table_is_the_formula():
    table = [row for row in rows(ROOT / "docs" / "eight-gpus.md") if row[0] in SHAPES]
    for name, short, long, cache in (row for row in table if len(row) == 4):
        *shape, keys = SHAPES[name]
        expected = [activations(tokens, *shape) / 1e9 for tokens in (8192, 16384)]
        expected.append(16384 * 2 * 2 * keys * shape[2] / 1e9)  # keys and values, two bytes each
        assert [short, long, cache] == [f"{value:.1f}" for value in expected], name
    assert len(table) > len(SHAPES)
