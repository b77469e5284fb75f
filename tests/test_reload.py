"""What a layer holds after a load is what came in for it, where that can be seen at all."""

from types import SimpleNamespace

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


def test_rows_that_an_engine_adds_to_the_vocabulary_must_be_zeros(model):
    held = ReceivedTensors(model)
    load(model, held.watch(tensors().items()))
    with torch.no_grad():
        model["embed"].weight[6] = float("nan")
    with pytest.raises(RuntimeError, match="first embed.weight"):
        held.compare()


# What vLLM's own reload leaves undefined -----------------------------------------------------------------------------


class Padded(nn.Module):
    """As layers that are rounded up for a kernel: five rows of eight come in."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 4))
        self.weight.weight_loader = lambda param, loaded: param.data[: len(loaded)].copy_(loaded)


class Mixer(nn.Module):
    """As a Mamba layer of which one tensor is counted twice: it seems full before `D` has come."""

    def __init__(self):
        super().__init__()
        self.A, self.D = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        for parameter in (self.A, self.D):
            parameter.weight_loader = lambda param, loaded: param.data.copy_(loaded)


class Whole(Mixer):
    """Nothing is wrong with it."""


class PictureNorm(Whole):
    """Beside it, as in Qwen2-VL: a norm that takes its values from the processor, and is in no checkpoint."""

    def __init__(self):
        super().__init__()
        norm = type("PixelNorm", (nn.Module,), {})()
        norm.register_buffer("weight", torch.full((3,), 2.0))
        self.norm = norm


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())  # once, as vLLM's models do
        for name, tensor in weights:
            parameters[name].weight_loader(parameters[name], tensor)


def reload(layer, *names):
    """What our worker makes of vLLM's own reload of this layer, with these tensors of ones coming in."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    from trl_qurl.rollout.engine.worker import RolloutWorker

    model = Model(layer)
    record_metadata_for_reloading(model)

    class Worker(RolloutWorker):
        vllm_config = SimpleNamespace(quant_config=None, model_config=SimpleNamespace(model=""))

        def get_model(self):
            return model

        def reload_weights(self, weights_iterator):
            initialize_layerwise_reload(model)
            model.load_weights(weights_iterator)
            finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.float32))

    shapes = {"layer.weight": (5, 4), "layer.A": (4,), "layer.D": (4,)}
    Worker().load_rollout_weights(
        {"version": "v"}, weights_iterator=[(name, torch.ones(shapes[name])) for name in names]
    )
    return model


@pytest.mark.parametrize(
    ("layer", "names"),
    [(Padded, ["layer.weight"]), (Mixer, ["layer.A", "layer.A", "layer.D"])],
    ids=["padded", "dropped"],
)
def test_a_layer_that_vllm_leaves_partly_undefined_is_refused_by_name(layer, names, caplog):
    with pytest.raises(RuntimeError, match=f"is undefined after a reload: {layer.__name__}. A tensor"):
        reload(layer(), *names)
    said = [record for record in caplog.records if "reload" in record.name]
    assert not said, "what vLLM says while it is watched reaches the user"


def test_a_layer_that_vllm_fills_is_loaded():
    model = reload(Whole(), "layer.A", "layer.D")
    assert model.layer.A.tolist() == model.layer.D.tolist() == [1.0] * 4


def test_a_norm_without_parameters_needs_no_new_weights():
    model = reload(PictureNorm(), "layer.A", "layer.D")
    assert model.layer.norm.weight.tolist() == [2.0] * 3 and model.layer.A.tolist() == [1.0] * 4


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


class Positioned(nn.Module):
    """Has a parameter, and a buffer that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.A = nn.Parameter(torch.zeros(4))
        self.D = nn.Parameter(torch.zeros(4))
        for parameter in (self.A, self.D):
            parameter.weight_loader = lambda held, tensor: held.data.copy_(tensor)
        self.register_buffer("positions", torch.arange(4.0), persistent=False)


@pytest.fixture
def defined_memory(monkeypatch):
    """Memory that nothing has been written to holds NaN, instead of what by luck is still there."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_a_buffer_beside_parameters_survives_a_reload(defined_memory):
    model = reload(Positioned(), "layer.A", "layer.D")
    assert model.layer.positions.tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(RuntimeError, match="is undefined after a reload: Positioned"):
        reload(Positioned(), "layer.A")
