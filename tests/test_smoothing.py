"""Smoothing leaves a model's function and weights alone, takes the harm off outliers, and reaches the engine."""

import copy
import json

import pytest
import torch
from test_mismatch import with_outliers
from test_uaq import VARIANTS, logits
from test_uaq import tiny_model as architecture
from tiny import tiny_model, tiny_tokenizer

from trl_qurl import QuRLGRPOConfig
from trl_qurl.quantization import get_scheme
from trl_qurl.quantization.fake_quantization import quantized_forward
from trl_qurl.quantization.smoothing import Source, fitted_scales, sources
from trl_qurl.quantization.weight_stream import WeightStream, model_parameters

TOKENS = torch.randint(2, 97, (8, 24), generator=torch.Generator().manual_seed(0))
FUSED = {"glm": 3, "glm4": 3, "phi3": 2, "cohere": 3, "cohere2": 3}


def smoothed_stream(model, tokens=TOKENS, passes=1):
    """The stream of a model whose scales are fitted to a pass over tokens, as two syncs do it."""
    weights = WeightStream(model, get_scheme("int8"), smooths=True)
    for _ in range(passes):
        weights.smoothing.collects = True
        dict(weights.smoothing.fold(model_parameters(model)))
        with torch.no_grad():
            model(tokens)
        weights.smoothing.fit()
        weights.smoothing.collects = False
    return weights


def folded(model, weights):
    """A copy of a model with what an engine would be sent, before it is rounded."""
    other = copy.deepcopy(model)
    tensors = dict(weights.smoothing.fold(model_parameters(model)))
    other.load_state_dict({**other.state_dict(), **tensors})
    return other.eval()


def kl(model, weights, smoothing=None):
    """KL between the quantized forward pass and the exact one, nats per token."""
    with torch.no_grad():
        exact = model(TOKENS).logits.log_softmax(-1)
        with quantized_forward(model, weights.layers, weights.scheme, smoothing):
            rounded = model(TOKENS).logits.log_softmax(-1)
    return (rounded.exp() * (rounded - exact)).sum(-1).mean().item()


# The function --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_function_and_the_policy_do_not_change(variant):
    model = architecture(variant)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = smoothed_stream(model, TOKENS % 45 + 3)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    other = folded(model, weights)
    changed = [name for name, tensor in other.state_dict().items() if not torch.equal(tensor, before[name])]
    expected = FUSED.get(VARIANTS[variant]["model_type"], 4)
    assert len(sources(model)) == 2 * expected and len(changed) >= 2 * expected
    # Powers of two: what is left are norms that multiply by 1 + weight.
    torch.testing.assert_close(logits(other), logits(model), rtol=1e-4, atol=1e-4)
    layer = "model.layers.0.mlp.down_proj"
    sent = other.state_dict()[f"{layer}.weight"]
    assert torch.equal(weights.smoothing.unfolded(layer, sent), before[f"{layer}.weight"])


def test_the_rows_of_a_layer_between_two_others_come_back_as_well():
    model = tiny_model("llama")
    weights = smoothed_stream(model)
    layer = "model.layers.1.mlp.up_proj"
    sent = folded(model, weights).state_dict()[f"{layer}.weight"]
    assert not torch.equal(sent, model.state_dict()[f"{layer}.weight"])
    assert torch.equal(weights.smoothing.unfolded(layer, sent), model.state_dict()[f"{layer}.weight"])


def test_channels_that_are_read_several_times_count_by_their_largest_value():
    source = Source("v", ("o",), None, repeats=2, width=2)  # two heads of values with two channels, each read twice
    assert source.gather(torch.tensor([1.0, 8.0, 3.0, 4.0, 5.0, 6.0, 7.0, 2.0])).tolist() == [3, 8, 7, 6]
    assert source.spread(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [1, 2, 1, 2, 3, 4, 3, 4]


def test_heads_that_share_values_share_their_scales():
    model = tiny_model("llama")  # 4 heads for queries, 2 for values, 32 channels each
    scale = smoothed_stream(model).smoothing.input_scale("model.layers.0.self_attn.o_proj").view(2, 2, 32)
    assert torch.equal(scale[:, 0], scale[:, 1]) and not torch.equal(scale[0], scale[1])


# The scales ----------------------------------------------------------------------------------------------------------


def test_scales_share_the_range_between_inputs_and_weights():
    inputs, columns = torch.tensor([64.0, 1.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 4.0, 1.0])
    # Half of the logarithms of 64, 1 and 1/4: 3, 0 and -1, with the mean 2/3; the last channel is never used.
    assert fitted_scales(inputs, columns).tolist() == [4.0, 0.5, 0.25, 1.0]


@pytest.mark.parametrize("reader", ["q_proj", "k_proj", "v_proj"])
def test_a_channel_counts_by_the_largest_column_of_all_that_read_it(reader):
    model, layer = tiny_model("llama"), "model.layers.0.self_attn.q_proj"
    before = smoothed_stream(model).smoothing.input_scale(layer)
    with torch.no_grad():
        model.get_submodule(f"model.layers.0.self_attn.{reader}").weight[:, 0] *= 256
    after = smoothed_stream(model).smoothing.input_scale(layer)
    # By the formula 256^½ = 16 times smaller. Rounding may double or halve that, and the mean moves by 4/128 for all.
    assert before[0] / 32 <= after[0] <= before[0] / 8
    assert ((after / before)[1:].log2().abs() <= 1).all()


def test_a_scale_stays_until_it_is_clearly_off():
    before, columns = torch.ones(2), torch.ones(2)
    for off, expected in ((0.7, [1.0, 1.0]), (0.8, [2.0, 0.5])):  # exponents by which the inputs ask for more and less
        inputs = 4 ** torch.tensor([off, -off])
        assert fitted_scales(inputs, columns, before).tolist() == expected
        assert fitted_scales(inputs, columns).tolist() == [2.0, 0.5]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_outliers_do_no_more_harm_than_none(family):
    plain = tiny_model(family).eval()
    model = with_outliers(tiny_model(family), 0).eval()
    weights = smoothed_stream(model)
    before, after = kl(model, weights), kl(model, weights, weights.smoothing)
    without = kl(plain, WeightStream(plain, get_scheme("int8")))
    assert before > 3 * without, "the outliers do no harm to begin with"
    assert after < 1.3 * without
    harmless = smoothed_stream(plain)
    assert kl(plain, harmless, harmless.smoothing) < 1.3 * without


def test_a_fit_without_a_pass_in_between_leaves_the_scales():
    model = tiny_model("llama")
    weights = smoothed_stream(model)
    before = weights.smoothing.input_scale("model.layers.0.mlp.down_proj")
    weights.smoothing.fit()
    assert torch.equal(weights.smoothing.input_scale("model.layers.0.mlp.down_proj"), before)


# Settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"smoothing_interval": -1}, "smoothing_interval is -1, but must be a number of syncs"),
        ({"rollout_quantization": None}, r"one scale \('int8', 'fp8'\), and rollout_quantization is None"),
        ({"rollout_quantization": "w4a16"}, "rollout_quantization is 'w4a16': set smoothing_interval=0"),
        ({"weight_sync": "llmcompressor"}, "weight_sync='llmcompressor'"),
        ({"weight_sync": "adapter"}, "weight_sync='adapter'"),
        ({"training_forward": "quantized"}, "training_forward='quantized': set smoothing_interval=0"),
    ],
)
def test_what_cannot_be_smoothed_is_refused(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        QuRLGRPOConfig(str(tmp_path), **({"smoothing_interval": 16, "use_cpu": True, "bf16": False} | settings))


def test_an_unknown_model_is_refused_by_name():
    with pytest.raises(ValueError, match=r"model type 'opt'.*smoothing_interval=0"):
        WeightStream(tiny_model("opt", ffn_dim=128, word_embed_proj_dim=128), get_scheme("int8"), smooths=True)


# A run ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(train, tmp_path_factory):
    """Two processes, each with an engine, and a policy with outliers; the scales are fitted at syncs 3 and 5.

    The norms of the second run are frozen, and syncs leave out what is frozen.
    """
    directory = tmp_path_factory.mktemp("smoothed")
    with_outliers(tiny_model("llama"), 0).save_pretrained(directory / "model")
    tiny_tokenizer().save_pretrained(directory / "model")
    config = {"smoothing_interval": 2, "sync_check_interval": 1, "learning_rate": 1e-5, "uaq_scale": 1.0}
    config |= {"max_steps": 8, "max_completion_length": 32, "num_generations": 8}
    frozen = config | {"sync_check_interval": 0, "weight_metrics_interval": 0}
    policy = [directory / "out", "--model", directory / "model", "--config"]
    return train(
        [*policy, json.dumps(config)], [*policy, json.dumps(frozen), "--freeze", "layernorm.weight"], processes=2
    )


@pytest.fixture(scope="module")
def smoothed_run(runs):
    return runs[0]


@pytest.mark.vllm
@pytest.mark.xdist_group("server")
def test_rollouts_are_smoothed_from_the_second_on(smoothed_run):
    rollouts = [row for row in smoothed_run["history"] if "mismatch/kl_k3" in row]
    assert len(rollouts) == 4
    first, *others = (row["mismatch/kl_k3"] for row in rollouts)
    assert all(kl_k3 < first / 2 for kl_k3 in others)


@pytest.mark.vllm
@pytest.mark.xdist_group("server")
def test_frozen_norms_are_sent_again_with_new_scales(runs):
    rollouts = [row for row in runs[1]["history"] if "mismatch/kl_k3" in row]
    first, *others = (row["mismatch/kl_k3"] for row in rollouts)
    assert rollouts[2]["sync/sent_mb"] < rollouts[1]["sync/sent_mb"], "a sync without a fit leaves out what is frozen"
    assert all(kl_k3 < first / 2 for kl_k3 in others)


@pytest.mark.vllm
@pytest.mark.xdist_group("server")
def test_engines_compute_what_the_trainer_smooths(smoothed_run):
    first, *others = (row["sync/probe_distance"] for row in smoothed_run["history"] if "sync/probe_distance" in row)
    assert len(others) == 3 and all(distance < first for distance in others), "the probe rounds other inputs"
    one, other = smoothed_run["probes"]
    assert one == other, "the engines of two processes have different scales"


@pytest.mark.vllm
@pytest.mark.xdist_group("server")
def test_a_fit_is_no_update(smoothed_run):
    """Smoothing moves a column by powers of two; at this learning rate an update moves a weight by a thousandth."""
    measured = [row["weights/normalized_update"] for row in smoothed_run["history"] if "sync/probe_ratio" in row]
    first, *others = measured  # the run starts with two syncs and nothing in between
    assert first == 0 and len(others) == 3 and all(0 < update < 1e-4 for update in others)
