"""Training in the quantized forward pass: what a layer computes, how often weights are rounded, what is refused."""

import json
import warnings

import pytest
import torch
from counting import counting_scheme, trainer_in_quantized_forward
from test_resume import metrics_by_step
from tiny import ENGINE, tiny_model, tiny_tokenizer
from torch import nn
from transformers import TrainerCallback

from trl_qurl import QuRLGRPOConfig
from trl_qurl.lab.evaluation.command import warn_of_other_formats
from trl_qurl.quantization import SCHEMES, fake_quantization, quantized_layer_names
from trl_qurl.quantization.fake_quantization import QuantizedLinear, exact_forward, quantize_layers, quantized_forward
from trl_qurl.trainers.callbacks import QuantizedForwardCallback

INT8 = SCHEMES["int8"]
PLAIN = {"use_cpu": True, "bf16": False, "report_to": []}


class PlainWrites(torch.optim.SGD):
    """An optimizer that torch's own count of changes does not see, as kernels behind pointers are."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"])


# A layer -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_gradients_are_those_of_a_layer_that_holds_the_rounded_weights(scheme, autocast):
    torch.manual_seed(0)
    layer = nn.Linear(128, 128)
    inputs = torch.randn(3, 5, 128)
    down = torch.randn(3, 5, 128)
    plain = nn.Linear(128, 128)
    plain.load_state_dict(layer.state_dict())
    with torch.no_grad():
        dtype = torch.bfloat16 if autocast else torch.float32
        plain.weight.copy_(scheme.dequantize(scheme.in_engine(scheme.quantize(layer.weight), dtype)))
    quantize_layers(nn.ModuleDict({"layer": layer}), {"layer"}, scheme)

    exact = inputs.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = layer(exact)
        rounded = scheme.quantize_activations(inputs.to(output.dtype)).requires_grad_()
        expected = plain(rounded)
    (output.float() * down).sum().backward()
    (expected.float() * down).sum().backward()
    assert output.dtype == dtype
    assert torch.equal(output, expected)
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    assert torch.equal(layer.bias.grad, plain.bias.grad)
    assert torch.equal(exact.grad, rounded.grad.float())


def test_a_model_stays_what_it_was_but_for_its_forward_pass():
    class OwnLinear(nn.Linear):
        pass

    model = tiny_model()
    model.model.layers[0].mlp.up_proj.__class__ = OwnLinear
    names, tokens = list(model.state_dict()), torch.tensor([[5, 9, 70, 33]])
    plain = model(tokens).logits
    layers = quantized_layer_names(model)
    with quantized_forward(model, layers, INT8):
        expected = model(tokens).logits
    assert type(model.model.layers[0].mlp.up_proj) is OwnLinear
    assert torch.equal(model(tokens).logits, plain) and not torch.equal(plain, expected)
    assert len(quantize_layers(model, layers, INT8)) == len(layers) == 14
    assert quantize_layers(model, layers, INT8) == []
    assert isinstance(model.model.layers[0].mlp.up_proj, OwnLinear)
    assert list(model.state_dict()) == names and quantized_layer_names(model) == layers
    assert torch.equal(model(tokens).logits, expected)
    with exact_forward(model):
        assert torch.equal(model(tokens).logits, plain)
    assert torch.equal(model(tokens).logits, expected)


# Rounding ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_weights_are_rounded_once_per_optimizer_step(tmp_path, reentrant):
    scheme = counting_scheme()
    model = tiny_model()
    checkpointing = {} if reentrant is None else {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    settings = {"gradient_accumulation_steps": 2, "max_steps": 3, "gradient_checkpointing": reentrant is not None}
    trainer_in_quantized_forward(model, scheme, tmp_path, **settings, **checkpointing).train()
    assert len(scheme.rounded) == 3 * 14
    with torch.no_grad():
        for _ in range(2):
            model(torch.tensor([[5, 9, 70, 33]]))
    assert len(scheme.rounded) == 4 * 14
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
        model(torch.tensor([[5, 9, 70, 33]]))
    assert len(scheme.rounded) == 4 * 14 + 1


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, PlainWrites])
def test_no_optimizer_leaves_old_rounded_weights(tmp_path, optimizer):
    model = tiny_model()
    trainer_in_quantized_forward(model, INT8, tmp_path, optimizer, max_steps=2).train()
    tokens = torch.tensor([[5, 9, 70, 33]])
    fresh = tiny_model()
    fresh.load_state_dict(model.state_dict())
    quantize_layers(fresh, quantized_layer_names(fresh), INT8)
    assert torch.equal(model(tokens).logits, fresh(tokens).logits)
    assert not torch.equal(tiny_model()(tokens).logits, fresh(tokens).logits)


class Edit(TrainerCallback):
    """Halves a weight at one event, behind torch's count of changes, and notes whether forward passes saw it."""

    def __init__(self, layer, event):
        self.seen = []
        setattr(self, event, self.halve)
        layer.register_forward_hook(self.compare)

        self.layer = layer

    def halve(self, *args, **kwargs):
        self.layer.weight.data.mul_(0.5)

    def compare(self, layer, inputs, output):
        rounded = INT8.dequantize(INT8.quantize(layer.weight))
        expected = nn.functional.linear(INT8.quantize_activations(inputs[0]), rounded, layer.bias)
        self.seen.append(torch.equal(output, expected))


@pytest.mark.parametrize("event", ["on_step_begin", "on_substep_end"])
def test_a_weight_that_a_callback_edits_is_rounded_again(tmp_path, event):
    model = tiny_model()
    trainer = trainer_in_quantized_forward(model, INT8, tmp_path, max_steps=2, gradient_accumulation_steps=2)
    edit = Edit(model.model.layers[1].mlp.up_proj, event)
    trainer.add_callback(edit)
    trainer.train()
    assert edit.seen == [True] * 4


# GPUs whose kernels leave activations alone --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "older", "newer"),
    [("fp8", (8, 6), (8, 9)), ("fp8_block", (8, 9), (9, 0)), ("mxfp8", (9, 0), (10, 0)), ("int8", None, (7, 5))],
)
def test_activations_are_rounded_where_the_engine_rounds_them(scheme, older, newer, monkeypatch):
    scheme, tokens = SCHEMES[scheme], torch.tensor([[5, 9, 70, 33]])
    model = tiny_model()
    layer, found = model.model.layers[0].mlp.up_proj, {}
    for capability in (older, newer):
        monkeypatch.setattr(fake_quantization, "gpu_capability", lambda capability=capability: capability)
        seen = []
        handle = layer.register_forward_hook(lambda layer, inputs, output, seen=seen: seen.extend([*inputs, output]))
        with torch.no_grad(), quantized_forward(model, {"model.layers.0.mlp.up_proj"}, scheme):
            model(tokens)
        handle.remove()
        inputs, output = seen
        weight = scheme.dequantize(scheme.quantize(layer.weight))
        for kind, x in (("exact", inputs), ("rounded", scheme.quantize_activations(inputs))):
            found[capability, kind] = torch.equal(output, nn.functional.linear(x, weight))
    assert found[newer, "rounded"] and not found[newer, "exact"]
    if older is not None:  # INT8 has no kernel there
        assert found[older, "exact"] and not found[older, "rounded"]


# What is refused, and what is recorded -------------------------------------------------------------------------------


def test_there_must_be_a_format():
    with pytest.raises(ValueError, match="training_forward='quantized' with rollout_quantization=None"):
        QuRLGRPOConfig("out", training_forward="quantized", rollout_quantization=None, **PLAIN)
    with pytest.raises(ValueError, match="training_forward"):
        QuRLGRPOConfig("out", training_forward="int8", **PLAIN)


def test_the_output_head_is_refused():
    with pytest.raises(ValueError, match="keep 'lm_head' in quantization_ignore"):
        QuantizedForwardCallback(INT8, []).change(tiny_model())


def test_the_config_records_the_format(tmp_path):
    model = tiny_model()
    trainer_in_quantized_forward(model, INT8, tmp_path)
    model.save_pretrained(tmp_path / "saved")
    saved = type(model).from_pretrained(tmp_path / "saved")
    assert saved.config.training_forward == {"scheme": "int8", "ignore": ["lm_head"]}
    assert not any(isinstance(module, QuantizedLinear) for module in saved.modules())


def test_an_evaluation_in_another_format_warns(tmp_path):
    model = tiny_model()
    model.config.training_forward = {"scheme": "int8", "ignore": ["lm_head"]}
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="trained with int8's forward pass .* worse in none, fp8: .*--schemes int8"):
        warn_of_other_formats(tmp_path, ["none", "int8", "fp8"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_other_formats(tmp_path, ["int8"])
        tiny_model().save_pretrained(tmp_path)
        warn_of_other_formats(tmp_path, ["none"])


# Several processes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_two_processes_learn_what_one_does(way, run_scenario, tmp_path):
    record = run_scenario("quantized_forward.py", tmp_path, way, processes=2)
    model = tiny_model()
    trainer_in_quantized_forward(model, INT8, tmp_path, max_steps=2, per_device_train_batch_size=4).train()
    trained = torch.load(tmp_path / "trained.pt")
    start = tiny_model().state_dict()
    rounded = [name for name in start if name.endswith("_proj.weight")]
    assert len(rounded) == 14
    for name in rounded:
        moved = (model.state_dict()[name] - start[name]).abs().max()
        assert moved > 0 and (trained[name] - model.state_dict()[name]).abs().max() < 0.02 * moved, name
    assert record["model"].startswith("FSDP" if way == "fsdp2" else "DistributedDataParallel")
    # DDP: once per step. FSDP2: in each forward pass, and where the backward pass computes it again.
    assert record["rounded"] == {"ddp": 2 * 14, "fsdp2": 2 * 2 * 14}[way]


# With an engine ------------------------------------------------------------------------------------------------------

FORWARD = {
    "training_forward": "quantized",
    "steps_per_generation": 4,
    "max_steps": 8,
    "save_strategy": "steps",
    "save_steps": 2,
    "beta": 0.01,
    "uaq_scale": 1.0,
    # In bfloat16 a last bit decides about codes of activations, on one side only.
    "vllm_engine_kwargs": ENGINE | {"dtype": "float32"},
}
SHORT = {"steps_per_generation": 2, "max_steps": 4}  # two rollouts, as in the long ones
RUNS = {
    "quantized": ([], {}),
    "full precision": ([], SHORT | {"training_forward": "full_precision"}),
    "PPO": (["--ppo"], SHORT | {"num_generations": 1, "uaq_scale": 1.5}),
    "PPO, bfloat16": (
        ["--ppo"],
        SHORT | {"bf16": True, "num_generations": 1, "rollout_quantization": "w4a16", "vllm_engine_kwargs": ENGINE},
    ),
    "adapter": (["--lora"], SHORT | {"round_base": True, "beta": 0.0}),
    "resumed": (["--resume", "quantized/checkpoint-2"], {}),
}


@pytest.fixture(scope="module")
def runs(train, tmp_path_factory):
    """Directory of the runs, and their records by name."""
    if torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM's INT8 kernel for CPUs with AMX takes inputs in 16 bits only")
    directory = tmp_path_factory.mktemp("runs")
    tiny_model().save_pretrained(directory / "policy")
    tiny_tokenizer().save_pretrained(directory / "policy")
    records = train(
        *(
            [directory / name, "--model", directory / "policy", "--save", "--config", json.dumps(FORWARD | config)]
            + [directory / option if "/" in option else option for option in options]
            for name, (options, config) in RUNS.items()
        )
    )
    return directory, dict(zip(RUNS, records, strict=True))


def logged(record, name):
    return [row[name] for row in record["history"] if name in row]


@pytest.mark.vllm
@pytest.mark.xdist_group("quantized forward")
class TestRuns:
    def test_both_policies_are_one_up_to_kernels(self, runs):
        kl = {name: logged(record, "mismatch/kl_k3") for name, record in runs[1].items()}
        assert len(kl["quantized"]) == len(kl["full precision"]) == len(kl["PPO"]) == 2
        same = kl["quantized"] + kl["PPO"] + kl["adapter"]
        assert min(same) > 0 and max(same) < 1e-7
        assert min(kl["full precision"]) > 1e-6
        assert max(kl["PPO, bfloat16"]) < 1e-5

    def test_a_reference_model_is_the_policy_at_the_start(self, runs):
        first, *_, last = logged(runs[1]["quantized"], "kl")
        assert first == 0 and last > 1e-3

    def test_critics_learn(self, runs):
        for name in ("PPO", "PPO, bfloat16"):
            assert runs[1][name]["critic_moved"] == runs[1][name]["critic_parameters"]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="equality to the last bit is claimed for the CPU only")
    def test_a_resumed_run_is_the_one_that_never_stopped(self, runs):
        expected, seen = metrics_by_step(runs[1]["quantized"]), metrics_by_step(runs[1]["resumed"])
        assert expected.keys() == set(range(1, 9))
        for step in range(3, 9):
            assert seen[step] == expected[step], f"step {step} differs"

    def test_the_saved_policy_says_which_format_it_was_trained_for(self, runs):
        config = json.loads((runs[0] / "quantized" / "config.json").read_text())
        assert config["training_forward"] == {"scheme": "int8", "ignore": ["lm_head"]}
        card = (runs[0] / "quantized" / "README.md").read_text()
        assert "the trained policy is the int8 one. Quantize these weights" in card
        assert "| `training_forward` | quantized |" in card
        assert "training_forward" not in json.loads((runs[0] / "full precision" / "config.json").read_text())
