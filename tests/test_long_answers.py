"""The memory of activations in docs/eight-gpus.md: the formula against torch, the table against the
formula.
"""

import pytest
import torch
from documents import ROOT, rows
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

SHAPES = {
    "Qwen2.5 0.5B": (896, 4864, 24, 896, 128),
    "Qwen2.5 1.5B": (1536, 8960, 28, 1536, 256),
    "Qwen2.5 3B": (2048, 11008, 36, 2048, 256),
    "Qwen2.5 7B": (3584, 18944, 28, 3584, 512),
    "Qwen2.5 14B": (5120, 13824, 48, 5120, 1024),
    "Qwen2.5 32B": (5120, 27648, 64, 5120, 1024),
    "Qwen3 0.6B": (1024, 3072, 28, 2048, 1024),
    "Qwen3 1.7B": (2048, 6144, 28, 2048, 1024),
    "Qwen3 4B": (2560, 9728, 36, 4096, 1024),
    "Qwen3 8B": (4096, 12288, 36, 4096, 1024),
    "Qwen3 14B": (5120, 17408, 40, 5120, 1024),
    "Qwen3 32B": (5120, 25600, 64, 8192, 1024),
}
"""Hidden and MLP size, layers, and the widths of all queries and of all keys."""

NORMALIZED = {"Qwen2.5": 4, "Qwen3": 10}
"""The page's c: bytes per query and key of a layer, more where the model normalizes them."""

FAMILIES = {
    "Qwen2.5": (Qwen2Config, Qwen2ForCausalLM),
    "Qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def activations(
    tokens: int, hidden: int, inner: int, layers: int, queries: int, keys: int, c: int
) -> int:
    """The page's formula, in bytes."""
    layer = 26 * hidden + 8 * inner + c * (queries + keys)
    return tokens * (4 * hidden * layers + layer)


def kept_bytes(family: str, layers: int, checkpointing: bool) -> float:
    """Return how many bytes per token torch keeps for a backward pass."""
    config_class, model_class = FAMILIES[family]
    config = config_class(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        head_dim=64,
    )
    model = model_class(config).model.train()
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


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_keeps_as_much_as_the_formula_says(family):
    checkpoint = kept_bytes(family, 4, True) - kept_bytes(family, 3, True)
    layer = kept_bytes(family, 4, False) - kept_bytes(family, 3, False)
    shape = (256, 128, NORMALIZED[family])  # the queries, the keys, and c
    assert checkpoint == activations(1, 256, 0, 1, *shape) - activations(1, 256, 0, 0, *shape)
    assert layer == pytest.approx(activations(1, 256, 1024, 0, *shape), rel=0.005)


def test_the_table_is_the_formula():
    table = [row for row in rows(ROOT / "docs" / "eight-gpus.md") if row[0] in SHAPES]
    assert [row[0] for row in table] == list(SHAPES)
    for name, short, long, cache in table:
        *_, layers, _, keys = SHAPES[name]
        c = NORMALIZED[name.split()[0]]
        expected = [activations(tokens, *SHAPES[name], c) / 1e9 for tokens in (8192, 16384)]
        expected.append(16384 * 2 * 2 * keys * layers / 1e9)  # keys and values, two bytes each
        assert [short, long, cache] == [f"{value:.1f}" for value in expected], name
