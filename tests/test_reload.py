"""What vLLM's own reload leaves undefined is an error."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn


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
