"""The estimate of the KL that the rounding of each layer causes."""

import pytest
import torch
from tiny import stream_of, tiny_model, with_outliers

from trl_qurl.lab.fake_quantization import quantized_forward
from trl_qurl.lab.mismatch.finer import find_steps
from trl_qurl.quantization import SCHEMES
from trl_qurl.quantization.layers import fused_groups
from trl_qurl.quantization.plan import QuantizationPlan

INT8 = SCHEMES["int8"]

TOKENS = torch.randint(5, 95, (8, 48), generator=torch.Generator().manual_seed(0))
PROMPTS = TOKENS.tolist()
FED = ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj")


@pytest.fixture(scope="module")
def model():
    """With outliers in the second of three blocks."""
    return with_outliers(tiny_model("llama", num_hidden_layers=3), 1).eval()


@pytest.fixture(scope="module")
def stream(model):
    return stream_of(model, INT8)


def exact_kl(model, layers, scheme):
    """KL(exact ‖ quantized), nats per token, with these layers quantized."""
    with torch.no_grad():
        exact = model(TOKENS).logits.log_softmax(-1)
        with quantized_forward(model, QuantizationPlan(dict.fromkeys(layers, scheme))):
            rounded = model(TOKENS).logits.log_softmax(-1)
    by_token = (exact.exp() * (exact - rounded)).sum(-1)
    return by_token.mean().item()


def kl_by_group(model, stream):
    return {step.layers: step.kl for step in find_steps(model, stream, PROMPTS)}


def test_an_estimate_is_near_the_kl_of_each_group(model, stream):
    estimates = kl_by_group(model, stream)
    assert len(estimates) == 12
    assert max(estimates, key=estimates.get) == FED
    for group, estimate in estimates.items():
        assert 0.1 < estimate / exact_kl(model, group, INT8) < 3, group
    whole = exact_kl(model, stream.plan.schemes, INT8)
    assert sum(estimates.values()) == pytest.approx(whole, rel=0.5)


def test_the_model_stays_as_it_is(model, stream):
    kinds = [type(module) for module in model.modules()]
    before = torch.random.get_rng_state()
    find_steps(model, stream, PROMPTS)
    assert torch.equal(torch.random.get_rng_state(), before)
    for module, kind in zip(model.modules(), kinds, strict=True):
        assert type(module) is kind
        assert not module._forward_hooks
    assert all(parameter.grad is None for parameter in model.parameters())


def test_smoothing_takes_the_outliers_off_the_estimate(model, stream):
    smoothed = stream_of(model, INT8, smooths=True)
    smoothed.fit_smoothing(model, PROMPTS)
    assert kl_by_group(model, smoothed)[FED] < kl_by_group(model, stream)[FED] / 5


def test_layers_that_an_engine_fuses_stay_together():
    layers = [
        "model.layers.10.mlp.down_proj",
        "model.layers.9.self_attn.v_proj",
        "model.layers.9.self_attn.q_proj",
        "model.layers.9.mlp.experts.0.up_proj",
        "model.layers.9.mlp.experts.0.down_proj",
        "model.layers.9.mlp.experts.1.up_proj",
    ]
    groups = [set(group) for group in fused_groups(layers)]
    # in the order of their names
    assert groups == [set(layers[:1]), set(layers[3:]), set(layers[1:3])]


@pytest.mark.parametrize("finer", [[], [SCHEMES["w8a16"]]])
def test_bytes_are_those_of_a_checkpoint(finer):
    model = tiny_model("llama", torch.bfloat16).eval()
    whole = stream_of(model, None)
    quantized = stream_of(model, INT8)
    steps = find_steps(model, quantized, PROMPTS[:1], finer)
    extra = whole.nbytes(torch.bfloat16) - quantized.nbytes(torch.bfloat16)
    assert sum(step.extra_bytes for step in steps) == extra


def test_a_finer_format_comes_before_16_bits_where_it_can_store_the_layers():
    """With exact activations, outliers do no harm; `down_proj` has 192 inputs, not a multiple of
    128.
    """
    model = with_outliers(tiny_model("llama", intermediate_size=192), 1).eval()
    stream = stream_of(model, INT8)
    steps = find_steps(model, stream, PROMPTS, [SCHEMES["w8a16"]])
    first, *others = [step for step in steps if step.layers == FED]
    assert steps[0] == first
    assert first.format == "w8a16"
    assert [step.format for step in others] == ["none"]
    assert first.kl > 10 * others[0].kl
    assert first.extra_bytes < others[0].extra_bytes / 20
    down = [step.format for step in steps if "down_proj" in step.layers[0]]
    assert down == ["none", "none"]
    exact = exact_kl(model, FED, INT8) - exact_kl(model, FED, SCHEMES["w8a16"])
    assert 1 / 3 < first.kl / exact < 3
