"""The memory of activations in docs/eight-gpus.md: the formula against torch."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "head_dim": 64,
}


def kept_bytes(config_class: type, model_class: type, layers: int, checkpointing: bool) -> float:
    """Return how many bytes per token torch keeps for a backward pass."""
    model = model_class(config_class(num_hidden_layers=layers, **SIZES)).model.train()
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


@pytest.mark.parametrize(
    ("classes", "c"),
    # more where the model normalizes queries and keys
    [((Qwen2Config, Qwen2ForCausalLM), 4), ((Qwen3Config, Qwen3ForCausalLM), 10)],
)
def test_torch_keeps_as_much_as_the_formula_says(classes, c):
    checkpoint, layer = (
        kept_bytes(*classes, 4, checkpoints) - kept_bytes(*classes, 3, checkpoints)
        for checkpoints in (True, False)
    )
    assert checkpoint == 4 * 256
    expected = 26 * 256 + 8 * 1024 + c * (256 + 128)  # the widths of all queries and keys
    assert layer == pytest.approx(expected, rel=0.005)
