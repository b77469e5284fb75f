"""Sizes of updates and of rounding: Eq. 13 and 14 of the paper, from a sample of rows."""

from types import SimpleNamespace

import pytest
import torch
from tiny import stream_of, tiny_model
from transformers import TrainerState

from trl_qurl.lab.update_size import STEPS, UpdateSizeCallback
from trl_qurl.quantization.merging import model_parameters


def watched(stream):
    """A callback that watches a stream, as in a trainer."""
    callback = UpdateSizeCallback()
    callback.recorded = {}
    callback.trainer = SimpleNamespace(
        vllm_generation=SimpleNamespace(weights=stream),
        state=TrainerState(),
        _record=callback.recorded.update,
    )
    callback.on_train_begin()
    callback.on_train_begin()  # of another training
    return callback


def sync(callback, model, step):
    callback.trainer.state.global_step = step
    callback.recorded.clear()
    for _ in callback.trainer.vllm_generation.weights.tensors(model_parameters(model)):
        pass
    return dict(callback.recorded)


def query_weights(model):
    layers = model.model.layers
    return [layer.self_attn.q_proj.weight.detach().clone() for layer in layers]


def relative(before, after):
    change = torch.cat(after) - torch.cat(before)
    return (change.square().sum() / torch.cat(before).square().sum()).item()


@pytest.mark.parametrize("name", ["int8", "fp8", "fp8_block", "w4a16"])
def test_a_sample_of_rows_measures_what_the_paper_does(name):
    model = tiny_model("llama", hidden_size=256, head_dim=128)
    weights = stream_of(model, name)
    stream = watched(weights)
    assert "weights/update/q_proj" not in sync(stream, model, step=0)
    before = query_weights(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.self_attn.q_proj.weight
            weight.add_(0.01 * weight.std() * torch.randn_like(weight))
    after = query_weights(model)
    scheme = weights.plan.schemes["model.layers.0.self_attn.q_proj"]
    rounded = [scheme.dequantize(scheme.quantize(weight)) for weight in after]

    assert sync(stream, model, step=STEPS - 1) == {}  # not due
    sizes = sync(stream, model, step=STEPS)
    assert sizes["weights/update/q_proj"] == pytest.approx(relative(before, after), rel=0.1)
    assert sizes["weights/rounding/q_proj"] == pytest.approx(relative(after, rounded), rel=0.2)
    assert sizes["weights/update/k_proj"] == 0
    assert sync(stream, model, step=0)  # another training with the same trainer


def test_other_smoothing_scales_are_no_update():
    model = tiny_model("llama")
    weights = stream_of(model, "int8", smooths=True)
    stream = watched(weights)
    first = sync(stream, model, step=0)
    for layer in range(2):
        weights.smoothing.scales[f"model.layers.{layer}.input_layernorm"] = torch.rand(128) + 0.5
    second = sync(stream, model, step=STEPS)
    assert second["weights/update/q_proj"] == 0
    assert second["weights/rounding/q_proj"] != first["weights/rounding/q_proj"]
    assert second["weights/rounding/o_proj"] == first["weights/rounding/o_proj"]
