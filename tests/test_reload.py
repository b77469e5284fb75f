"""Values that vLLM's reload leaves undefined are an error."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn


class Layer(nn.Module):
    """Parameters that each tensor of a checkpoint overwrites, from the start on."""

    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            parameter = nn.Parameter(torch.zeros(shape))
            parameter.weight_loader = lambda param, loaded: param.data[: len(loaded)].copy_(loaded)
            self.register_parameter(name, parameter)


class Padded(Layer):
    """Rounded up for a kernel: five rows of eight are in the checkpoint."""

    def __init__(self):
        super().__init__(weight=(8, 4))


class Mixer(Layer):
    """Like a Mamba layer of which one tensor is counted twice:
    it seems full before `D` has come.
    """

    def __init__(self):
        super().__init__(A=4, D=4)


class WithNorm(Mixer):
    """Like Qwen2-VL's: its norm has values from the processor, not from a checkpoint."""

    def __init__(self):
        super().__init__()
        self.norm = type("PixelNorm", (nn.Module,), {})()
        self.norm.register_buffer("weight", torch.full((3,), 2.0))


class Positioned(Mixer):
    """With a buffer that is in no checkpoint."""

    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.arange(4.0), persistent=False)


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())  # once, as vLLM's models do
        for name, tensor in weights:
            parameters[name].weight_loader(parameters[name], tensor)


def pair():
    return nn.ModuleDict({"first": Positioned(), "second": Positioned()})


def reload(layer, *names):
    """A model with this layer, after our worker has reloaded it with these tensors of ones through
    vLLM.
    """
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

    weights = [(name, torch.ones((5, 4) if name == "layer.weight" else 4)) for name in names]
    Worker().load_rollout_weights({"version": "v"}, weights_iterator=weights)
    return model


@pytest.mark.parametrize(
    ("layer", "names"),
    [(Padded, ["layer.weight"]), (Mixer, ["layer.A", "layer.A", "layer.D"])],
    ids=["padded", "dropped"],
)
def test_a_layer_with_undefined_values_is_an_error(layer, names, caplog):
    with pytest.raises(
        RuntimeError, match=f"is undefined after a reload: {layer.__name__}. Leave them"
    ):
        reload(layer(), *names)
    said = [record for record in caplog.records if "reload" in record.name]
    assert not said, "the user sees what vLLM logs while we listen"


def test_a_complete_layer_is_loaded():
    layer = reload(WithNorm(), "layer.A", "layer.D").layer
    assert layer.A.tolist() == layer.D.tolist() == [1.0] * 4
    assert layer.norm.weight.tolist() == [2.0] * 3, "a norm without parameters needs no weights"


@pytest.fixture
def defined_memory(monkeypatch):
    """Fill new memory with NaN, for a result that does not depend on luck."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("last", ["first", "second"])
def test_a_complete_layer_does_not_hide_one_of_its_class(last, defined_memory):
    names = ["layer.first.A", "layer.second.A", "layer.second.D"]
    names.sort(key=lambda name: last in name)
    with pytest.raises(RuntimeError, match="is undefined after a reload: Positioned"):
        reload(pair(), *names)
    layer = reload(pair(), "layer.first.D", *names).layer
    assert layer["first"].positions.tolist() == [0.0, 1.0, 2.0, 3.0]
