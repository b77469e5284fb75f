"""The estimate of the KL that the rounding of each layer causes."""

import pytest
import torch
from tiny import stream_of, tiny_model, with_outliers

from trl_qurl.quantization import SCHEMES
from trl_qurl.quantization.fake_quantization import quantized_forward
from trl_qurl.quantization.layers import fused_groups
from trl_qurl.quantization.plan import QuantizationPlan
from trl_qurl.quantization.sensitivity import estimate_kl, extra_bytes

INT8 = SCHEMES["int8"]

TOKENS = torch.randint(5, 95, (8, 48), generator=torch.Generator().manual_seed(0))
FED = ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj")


@pytest.fixture(scope="module")
def weights():
    """Of a model with outliers in the second of its three blocks, and the model."""
    model = with_outliers(tiny_model("llama", num_hidden_layers=3), 1).eval()
    return model, stream_of(model, INT8)


def exact_kl(model, layers, scheme):
    """KL(exact ‖ quantized), nats per token, with these layers quantized."""
    with torch.no_grad():
        exact = model(TOKENS).logits.log_softmax(-1)
        with quantized_forward(model, QuantizationPlan(dict.fromkeys(layers, scheme))):
            rounded = model(TOKENS).logits.log_softmax(-1)
    return float((exact.exp() * (exact - rounded)).sum(-1).mean())


def test_an_estimate_is_near_the_kl_of_each_group(weights):
    model, stream = weights
    estimates = estimate_kl(model, stream, TOKENS.tolist())
    assert len(estimates) == 12 and max(estimates, key=estimates.get) == FED
    for group, estimate in estimates.items():
        assert 0.1 < estimate / exact_kl(model, group, INT8) < 3, group
    assert sum(estimates.values()) == pytest.approx(exact_kl(model, stream.plan.schemes, INT8), rel=0.5)


def test_the_model_stays_as_it_is(weights):
    model, stream = weights
    kinds = [type(module) for module in model.modules()]
    before = torch.random.get_rng_state()
    estimate_kl(model, stream, TOKENS.tolist())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert [type(module) for module in model.modules()] == kinds
    assert all(not module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_smoothing_takes_the_outliers_off_the_estimate(weights):
    model, stream = weights
    smoothed = stream_of(model, INT8, smooths=True)
    smoothed.fit_smoothing(model, TOKENS.tolist())
    assert estimate_kl(model, smoothed, TOKENS.tolist())[FED] < estimate_kl(model, stream, TOKENS.tolist())[FED] / 5
    smoothed.smoothing.close()


def test_layers_that_an_engine_fuses_stay_together():
    names = ["model.layers.10.mlp.down_proj", "model.layers.9.self_attn.v_proj", "model.layers.9.self_attn.q_proj"]
    names += [f"model.layers.9.mlp.experts.{expert}.{part}_proj" for expert in (0, 1) for part in ("up", "down")]
    assert {frozenset(group) for group in fused_groups(names)} == {
        frozenset(names[:1]),
        frozenset(names[1:3]),
        frozenset(names[3:]),
    }


def test_bytes_are_those_of_a_checkpoint():
    model = tiny_model("llama", torch.bfloat16)
    whole, quantized = (stream_of(model, each) for each in (None, INT8))
    assert sum(extra_bytes(quantized).values()) == whole.nbytes(torch.bfloat16) - quantized.nbytes(torch.bfloat16)
