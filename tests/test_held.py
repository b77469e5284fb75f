"""What a layer holds after a load is what came in for it, where that can be seen at all."""

import pytest
import torch
from torch import nn

from trl_qurl.rollout.checks.tensors import ReceivedTensors


class VocabParallelEmbedding(nn.Module):
    """As vLLM's: it has a method to multiply by, uses it only as an output head, and rounds the vocabulary up."""

    quant_method = object()

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 4, dtype=torch.bfloat16))


class Multiplying(nn.Module):
    quant_method = object()

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))


@pytest.fixture
def model():
    return nn.ModuleDict({"embed": VocabParallelEmbedding(), "norm": nn.RMSNorm(4), "linear": Multiplying()})


def load(model, tensors, but=None):
    """As an engine does: rounded to its dtype, repacked where it multiplies; `but` is changed on the way."""
    with torch.no_grad():
        for name, tensor in tensors:
            held = model.get_parameter(name)
            held[: len(tensor)] = 2 * tensor if name == but else tensor
            if "linear" in name:
                held.copy_(held.flip(0).clone())


def tensors():
    return {"embed.weight": torch.randn(5, 4), "norm.weight": torch.randn(4), "linear.weight": torch.randn(4, 4)}


def test_only_what_keeps_its_layout_is_compared(model):
    held = ReceivedTensors(model)
    load(model, held.watch(tensors().items()))
    assert held.compare() == ["embed.weight", "norm.weight"]


@pytest.mark.parametrize("name", ["embed.weight", "norm.weight"])
def test_a_loader_that_changes_a_tensor_is_noticed(name, model):
    held = ReceivedTensors(model)
    load(model, held.watch(tensors().items()), but=name)
    with pytest.raises(RuntimeError, match=f"1 of the 2 parameters that can be compared .* first {name}"):
        held.compare()


def test_nothing_is_read_where_nothing_is_asked(model):
    held = ReceivedTensors(model, enabled=False)
    given = tensors()
    assert dict(held.watch(given.items())) == given
    assert held.compare() == []


def test_a_parameter_that_is_kept_wider_is_not_compared():
    class Wider(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 6))

    held = ReceivedTensors(nn.ModuleDict({"positions": Wider()}))
    list(held.watch({"positions.weight": torch.randn(5, 4)}.items()))
    assert held.compare() == []
