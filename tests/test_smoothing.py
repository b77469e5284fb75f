"""Smoothing keeps a model's function and weights, removes the error that outliers cause, and
reaches the engine.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import needs_llmcompressor, needs_vnni
from support.configs import config
from support.dense_models import VARIANTS, dense_model, logits
from support.training import rollout_rows
from tiny import assert_same_bits, rollout_settings, save_tiny, stream_of, tiny_model, with_outliers

from trl_qurl.lab.fake_quantization import quantized_forward
from trl_qurl.quantization.checkpoint import CheckpointWriter
from trl_qurl.quantization.merging import model_parameters
from trl_qurl.quantization.smoothing import LARGEST_SCALE, can_smooth, fitted_scales, sources
from trl_qurl.quantization.storage import read_tensors
from trl_qurl.rollout.checks.tensors import MeteredStream
from trl_qurl.rollout.directory import CheckpointFolder
from trl_qurl.rollout.group import APART
from trl_qurl.rollout.preparation import prepare_weights
from trl_qurl.rollout.routes import LLMCompressorRoute
from trl_qurl.rollout.wire import WeightUpdate

TOKENS = torch.randint(2, 97, (8, 24), generator=torch.Generator().manual_seed(0))
# Fused projections, or one norm for two readers: two sources per layer instead of three.
FUSED = ("glm", "glm4", "phi3", "cohere", "cohere2")


def smoothed_stream(model, tokens=TOKENS, ignore=("lm_head",)):
    """The stream of a model, with scales fitted to a pass over tokens."""
    weights = stream_of(model, "int8", ignore, smooths=True)
    weights.fit_smoothing(model, tokens.tolist())
    return weights


def folded(model, weights):
    """A copy of a model with what an engine would be sent, before it is rounded."""
    other = copy.deepcopy(model)
    tensors = dict(weights.smoothing.fold(model_parameters(model)))
    other.load_state_dict(other.state_dict() | tensors)
    return other.eval()


def kl(model, weights, smoothing=None):
    """KL between the quantized forward pass and the exact one, nats per token."""
    with torch.no_grad():
        exact = model(TOKENS).logits.log_softmax(-1)
        with quantized_forward(model, weights.plan, smoothing):
            rounded = model(TOKENS).logits.log_softmax(-1)
    by_token = (rounded.exp() * (rounded - exact)).sum(-1)
    return by_token.mean().item()


# The function
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_smoothing_changes_neither_function_nor_policy(variant):
    model = dense_model(variant)
    before = copy.deepcopy(model.state_dict())
    weights = smoothed_stream(model, TOKENS % 45 + 3)
    assert_same_bits(model.state_dict(), before)
    other = folded(model, weights)
    assert len(sources(model)) == 2 * (2 if variant in FUSED else 3)
    torch.testing.assert_close(logits(other), logits(model), rtol=1e-4, atol=1e-4)


# The scales
# --------------------------------------------------------------------------------------------------


def test_scales_share_the_range_between_inputs_and_weights():
    # sums of squares
    inputs = torch.tensor([1024.0, 1.0, 1.0, 0.0])
    columns = torch.tensor([1.0, 1.0, 1 / 1024, 1.0])
    # 1024^0.2, 1 and 1024^0.3 have the geometric mean 2^(5/3); the last channel is never used.
    expected = torch.tensor([2.0**2, 2.0**0, 2.0**3]) / 2 ** (5 / 3)
    torch.testing.assert_close(fitted_scales(inputs, columns)[:3], expected)
    assert fitted_scales(inputs, columns)[3] == 1


def test_scales_have_a_limit():
    scales = fitted_scales(torch.tensor([1e30, 1.0]), torch.tensor([1.0, 1e30]))
    assert scales.tolist() == [LARGEST_SCALE, 1 / LARGEST_SCALE]


@pytest.mark.parametrize("reader", ["q_proj", "k_proj", "v_proj"])
def test_scales_depend_on_the_largest_column_of_all_readers(reader):
    model = tiny_model("llama")
    layer = "model.layers.0.self_attn.q_proj"
    before = smoothed_stream(model).smoothing.input_scale(layer)
    with torch.no_grad():
        model.get_submodule(f"model.layers.0.self_attn.{reader}").weight[:, 0] *= 256
    after = smoothed_stream(model).smoothing.input_scale(layer)
    # Nearly all of the column is this reader's now; the mean over channels moves a little for all.
    assert after[0] < before[0] / 8
    moved = (after / before)[1:]
    torch.testing.assert_close(moved, moved[0].expand_as(moved))
    assert 1 < moved[0] < 1.1


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_smoothing_removes_the_error_of_outliers(family):
    plain = tiny_model(family).eval()
    model = with_outliers(tiny_model(family), 0).eval()
    weights = smoothed_stream(model)
    before = kl(model, weights)
    after = kl(model, weights, weights.smoothing)
    without = kl(plain, stream_of(plain, "int8"))
    assert before > 3 * without, "the outliers do no harm to begin with"
    assert after < 1.3 * without
    harmless = smoothed_stream(plain)
    assert kl(plain, harmless, harmless.smoothing) < 1.3 * without


FEWER = ["lm_head", "re:.*down_proj"]


@pytest.mark.parametrize(("before", "after"), [(["lm_head"], FEWER), (FEWER, ["lm_head"])])
def test_state_of_other_layers_is_not_loaded(before, after):
    def fitted(ignore, seed):
        model = tiny_model("llama", seed=seed)
        return model, smoothed_stream(model, ignore=ignore)

    saved = fitted(before, 0)[1].smoothing
    saved.begin_sync()  # from here on, it collects for its next fit
    same = fitted(before, 1)[1].smoothing
    same.load_state_dict(saved.state_dict())
    assert same.scales is saved.scales
    assert same.collects
    model, other = fitted(after, 1)
    expected = dict(other.smoothing.scales)
    other.smoothing.load_state_dict(saved.state_dict())
    assert other.smoothing.scales == expected
    for _ in range(2):  # syncs, the second with a fit
        other.smoothing.begin_sync()
        dict(other.smoothing.fold(model_parameters(model)))


# Two ways to round
# --------------------------------------------------------------------------------------------------


@needs_llmcompressor
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_llmcompressor_rounds_the_weights_that_are_smoothed(family, dtype, tmp_path):
    model = tiny_model(family)
    weights = smoothed_stream(model)
    writer = CheckpointWriter(model, None, weights.plan)
    folder = CheckpointFolder(Accelerator(), writer, str(tmp_path), 0, is_served=False)
    route = LLMCompressorRoute(model, weights, APART, folder)
    received = {}

    def load_checkpoint(path, update):
        received.update(read_tensors(path))

    route.attach(SimpleNamespace(load_checkpoint=load_checkpoint), dtype)
    route.send(WeightUpdate("v1"), MeteredStream(route.tensors(), None))
    sent = dict(route.tensors())
    assert_same_bits(received, sent)
    gains = "model.layers.1.input_layernorm.weight"
    assert not torch.equal(sent[gains].float(), model.get_parameter(gains)), "nothing is smoothed"


# Settings
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout_quantization": None},
        {"rollout_quantization": "fp8"},
        {"weight_sync": "adapter"},
        {"round_base": True},
        {"smooth_activations": False},
    ],
)
def test_nothing_is_smoothed_where_that_cannot_act(settings):
    assert config(**settings).smooths is False


def test_int8_is_smoothed_by_default_for_known_models():
    assert config().smooths is None, "the model decides"
    unknown = tiny_model("opt", ffn_dim=128, word_embed_proj_dim=128)
    assert can_smooth(tiny_model("llama"))
    assert not can_smooth(unknown)
    with pytest.raises(ValueError, match=r"model type 'opt'.*Leave smooth_activations out"):
        stream_of(unknown, "int8", smooths=True)


def test_scales_are_not_fitted_before_a_model_is_on_its_device():
    passes = []
    settings = rollout_settings("int8", smooths=True)
    # as if the launcher had yet to move or shard it
    for device, expected in (("meta", 0), ("cpu", 1)):
        model = tiny_model(tie_word_embeddings=False).to(device)
        model.get_decoder().register_forward_pre_hook(lambda *arguments: passes.append(1))
        weights = prepare_weights(model, settings, Accelerator(), lambda: TOKENS[:1].tolist())
        assert len(passes) == expected
        assert bool(weights.smoothing.scales) == bool(expected)


# A run
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(train, tmp_path_factory):
    """A policy with outliers in two processes with an engine each: plain, then smoothed from the
    first prompts on.
    """
    directory = tmp_path_factory.mktemp("smoothed")
    save_tiny(directory / "model", model=with_outliers(tiny_model("llama"), 0))
    settings = {
        "sync_check_interval": 1,
        "learning_rate": 1e-5,
        "max_steps": 8,
        "max_completion_length": 32,
        "num_generations": 8,
    }
    policy = [directory / "out", "--model", directory / "model"]
    runs = ([*policy, settings | {"smooth_activations": smooths}] for smooths in (False, None))
    return train(*runs, processes=2)


def logged(run, metric):
    rows = rollout_rows(run)
    assert len(rows) == 4
    return [row[metric] for row in rows]


@pytest.mark.vllm
@pytest.mark.xdist_group("server")
@needs_vnni
def test_rollouts_are_smoothed_from_the_first_on(runs):
    plain, smoothed = (logged(run, "mismatch/kl_k3") for run in runs)
    assert max(smoothed) < min(plain) / 2


@pytest.mark.vllm
@pytest.mark.xdist_group("server")
def test_engines_compute_what_the_trainer_smooths(runs):
    one, other = runs[1]["probes"]
    assert one == other, "the engines of two processes have different scales"
