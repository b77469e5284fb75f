"""UAQ leaves every known architecture's function alone, acts once, and says no where it cannot."""

import copy
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
from support.architectures import IDS, TINY, VARIANTS, logits, tiny_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from trl_qurl.quantization.architectures import ARCHITECTURES
from trl_qurl.quantization.uaq import recorded_scale, scale_model_
from trl_qurl.trainers.callbacks import UpdateAwareQuantizationCallback

STORIES = Path(__file__).parents[1].parent / "shared" / "models" / "stories260K"


def relative_change(before, after):
    return ((after - before).abs().max() / before.abs().max()).item()


def parameters(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


def test_every_known_architecture_is_tried():
    assert {options["model_type"] for options in VARIANTS.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("scale", [1.5, 3.0, 0.7])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_do_not_change(variant, scale):
    model = tiny_model(variant)
    before = logits(model)
    assert scale_model_(model, scale) is True
    assert recorded_scale(model) == scale
    assert relative_change(before, logits(model)) < 1e-5


def mlp_norm(variant):
    if variant.startswith("cohere"):
        return "input_layernorm"
    return "pre_feedforward_layernorm" if variant in ("gemma2", "gemma3_text") else "post_attention_layernorm"


def gate(variant):
    return "mlp.gate_up_proj" if variant in ("glm", "glm4", "phi3") else "mlp.gate_proj"


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_norm_feeds_is_halved_its_gain_doubled_and_nothing_else_touched(variant):
    # Left alone: biases, o_proj, down_proj, q/k norms, norms behind a block, the last norm, embedding and head.
    model = tiny_model(variant)
    before = parameters(model)
    scale_model_(model, 2.0)
    offset = 1.0 if variant.startswith("gemma") else 0.0
    for name, parameter in model.named_parameters():
        expected = before[name]
        if re.search(r"layers\.\d\.(self_attn\.(q|k|v|qkv)_proj|mlp\.(gate|up|gate_up)_proj)\.weight", name):
            expected = expected / 2
        elif re.search(rf"layers\.\d\.(input_layernorm|{mlp_norm(variant)})\.weight", name):
            expected = 2 * expected + offset  # 2 (offset + w) − offset
        assert torch.equal(parameter, expected), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_logits_would_show_a_forgotten_norm_or_layer(variant):
    # Not shown by logits: q and k under q/k norms, v and up under Gemma's norms behind each block, all blind to scale.
    for forgotten in (mlp_norm(variant), gate(variant)):
        model = tiny_model(variant)
        before = logits(model)
        original = model.get_submodule(f"model.layers.0.{forgotten}").weight.detach().clone()
        scale_model_(model, 1.5)
        model.get_submodule(f"model.layers.0.{forgotten}").weight.data.copy_(original)
        assert relative_change(before, logits(model)) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_power_of_two_is_exact_and_silent(dtype):
    model = tiny_model("qwen2", dtype)
    before = logits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scale_model_(model, 2.0)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    ("variant", "scale", "dtype"),
    [("llama", 1.5, torch.bfloat16), ("llama", 1.5, torch.float16), ("gemma", 2.0, torch.bfloat16)],
)
def test_half_precision_warns_and_names_the_way_out(variant, scale, dtype):
    model = tiny_model(variant, dtype)
    with pytest.warns(UserWarning, match=f'{dtype}.*"dtype": "float32"') as caught:
        scale_model_(model, scale)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_float32_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scale_model_(tiny_model("gemma"), 1.5)


def test_the_same_scale_again_does_nothing_and_another_is_refused():
    model = tiny_model()
    scale_model_(model, 1.5)
    scaled = parameters(model)
    assert scale_model_(model, 1.5) is False
    with pytest.raises(ValueError, match=r"scale 2\.0.*already scaled by 1\.5.*load the unscaled model"):
        scale_model_(model, 2.0)
    assert same(parameters(model), scaled)


@pytest.mark.parametrize("variant", ["qwen2", "gemma3_text"])
def test_saving_and_loading_keeps_the_record(variant, tmp_path):
    model = tiny_model(variant)
    scale_model_(model, 1.5)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert recorded_scale(loaded) == 1.5
    assert scale_model_(loaded, 1.5) is False
    assert same(parameters(loaded), parameters(model))


@pytest.mark.parametrize("scale", [0.0, -1.5, math.inf, math.nan])
def test_impossible_scales_are_refused(scale):
    with pytest.raises(ValueError, match="finite and above 0"):
        scale_model_(tiny_model(), scale)


def test_unknown_architecture_is_named_with_the_known_ones():
    config = AutoConfig.for_model("gpt2", n_embd=8, n_layer=1, n_head=2, vocab_size=16)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"'gpt2'.*llama, mistral, .*qwen2.*uaq_scale=1\.0"):
        scale_model_(model, 1.5)
    assert scale_model_(model, 1.0) is False


def fuse_gate_and_up(layer):
    layer.mlp.gate_up_proj = nn.Linear(32, 80)
    del layer.mlp.up_proj


def empty_the_shard(layer):
    layer.self_attn.v_proj.weight.data = torch.empty(0)


def leave_on_meta(layer):
    layer.mlp.gate_proj.to("meta")


def store_as_int8(layer):
    layer.mlp.gate_proj.weight = nn.Parameter(torch.zeros(40, 32, dtype=torch.int8), requires_grad=False)


def drop_the_norm(layer):
    del layer.input_layernorm


@pytest.mark.parametrize(
    ("break_layer", "message"),
    [
        (fuse_gate_and_up, r"layers\.1\.mlp\.up_proj.*fused"),
        (empty_the_shard, r"layers\.1\.self_attn\.v_proj.*not in memory"),
        (leave_on_meta, r"layers\.1\.mlp\.gate_proj.*not in memory"),
        (store_as_int8, r"layers\.1\.mlp\.gate_proj.*int8"),
    ],
)
def test_one_unusable_layer_stops_it_before_anything_changes(break_layer, message):
    model = tiny_model()
    break_layer(model.model.layers[1])
    first_layer = parameters(model.model.layers[0])
    with pytest.raises(ValueError, match=message):
        scale_model_(model, 1.5)
    assert same(parameters(model.model.layers[0]), first_layer)
    assert recorded_scale(model) == 1.0


def test_no_layer_found_is_an_error():
    model = tiny_model()
    for layer in model.model.layers:
        drop_the_norm(layer)
    with pytest.raises(ValueError, match="which norm feeds which layer in LlamaForCausalLM, model type 'llama'"):
        scale_model_(model, 1.5)


def test_adapters_are_refused():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match=r"PEFT.*uaq_scale=1\.0"):
        scale_model_(peft.get_peft_model(tiny_model(), lora), 1.5)
    injected = tiny_model()
    injected.add_adapter(lora)
    with pytest.raises(ValueError, match="without adapters"):
        scale_model_(injected, 1.5)


@pytest.mark.skipif(not STORIES.exists(), reason="the trained stories260K model is not beside this checkout")
def test_a_trained_model_keeps_its_function():
    model = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32)
    ids = torch.randint(3, 512, (2, 40), generator=torch.Generator().manual_seed(0))
    before = logits(model, ids)
    scale_model_(model, 1.5)
    assert relative_change(before, logits(model, ids)) < 1e-5


def trainer(model, folder, callback, max_steps=2):
    dataset = [{"input_ids": row, "labels": row} for row in IDS.repeat(4, 1)]
    args = TrainingArguments(
        output_dir=str(folder), max_steps=max_steps, per_device_train_batch_size=2, save_steps=1, learning_rate=1e-2,
        lr_scheduler_type="constant", use_cpu=True, report_to=[], disable_tqdm=True, seed=0,
    )  # fmt: skip
    return Trainer(model=model, args=args, train_dataset=dataset, callbacks=[callback] if callback else None)


def test_callback_acts_when_the_trainer_is_built(tmp_path):
    model = tiny_model("qwen2")
    start = parameters(model)
    trainer(model, tmp_path, UpdateAwareQuantizationCallback(scale=1.5))
    assert recorded_scale(model) == 1.5
    weight = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(model.get_parameter(weight), start[weight] / 1.5)


def test_resuming_does_not_scale_again(tmp_path):
    start = tiny_model("qwen2")
    straight = trainer(copy.deepcopy(start), tmp_path / "straight", UpdateAwareQuantizationCallback(1.5))
    straight.train()

    resumed = trainer(copy.deepcopy(start), tmp_path / "resumed", UpdateAwareQuantizationCallback(1.5))
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-1"))

    assert resumed.state.global_step == straight.state.global_step == 2
    torch.testing.assert_close(parameters(resumed.model), parameters(straight.model))
    checkpoint = AutoModelForCausalLM.from_pretrained(tmp_path / "straight" / "checkpoint-2")
    assert recorded_scale(checkpoint) == 1.5


def test_a_scaled_checkpoint_that_is_trained_anew_is_not_scaled_again(tmp_path):
    model = tiny_model()
    scale_model_(model, 1.5)
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    trainer(loaded, tmp_path, UpdateAwareQuantizationCallback(1.5))
    assert same(parameters(loaded), parameters(model))


def unknown_model():
    options = {**TINY, "model_type": "olmo2"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**options))


def test_a_model_that_uaq_does_not_know_is_refused(tmp_path):
    with pytest.raises(ValueError, match="model type 'olmo2'"):
        trainer(unknown_model(), tmp_path, UpdateAwareQuantizationCallback(1.5))


def test_a_callback_added_too_late_is_an_error(tmp_path):
    late = trainer(tiny_model(), tmp_path, None)
    late.add_callback(UpdateAwareQuantizationCallback(1.5))
    with pytest.raises(RuntimeError, match=r"callbacks=\[\.\.\.\]"):
        late.train()
