"""Update-aware quantization keeps every known architecture's function, acts once, and refuses other
models.
"""

import copy
import math
import re
import warnings

import pytest
import torch
from support.dense_models import IDS, VARIANTS, dense_model, logits
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from trl_qurl.quantization.uaq import recorded_scale, scale_model_
from trl_qurl.trainers.callbacks import UpdateAwareQuantizationCallback


def parameters(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("scale", [1.5, 3.0, 0.7])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_do_not_change(variant, scale):
    model = dense_model(variant)
    before = logits(model)
    weight = [p for name, p in model.named_parameters() if re.search("q(kv)?_proj.weight", name)][0]
    largest = weight.max().item()
    assert scale_model_(model, scale) is True
    assert recorded_scale(model) == scale
    assert weight.max().item() == pytest.approx(largest / scale)
    after = logits(model)
    assert ((after - before).abs().max() / before.abs().max()).item() < 1e-5


@pytest.mark.parametrize(
    ("variant", "scale", "dtype", "is_exact"),
    [
        ("qwen2", 2.0, torch.bfloat16, True),
        ("gemma", 1.5, torch.float32, True),
        ("llama", 1.5, torch.float16, False),
        ("gemma", 2.0, torch.bfloat16, False),  # its gains have an offset
    ],
)
def test_half_precision_warns_unless_scaling_is_exact(variant, scale, dtype, is_exact):
    model = dense_model(variant, dtype)
    before = logits(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scale_model_(model, scale)
    assert [warning.filename for warning in caught] == ([] if is_exact else [__file__])
    assert is_exact or re.search(f'{dtype}.*"dtype": "float32"', str(caught[0].message))
    if scale == 2.0 and is_exact:
        assert torch.equal(logits(model), before)


def test_the_same_scale_again_does_nothing_and_another_is_refused():
    model = dense_model()
    scale_model_(model, 1.5)
    scaled = parameters(model)
    assert scale_model_(model, 1.5) is False
    with pytest.raises(
        ValueError, match=r"scale 2\.0.*already scaled by 1\.5.*load the unscaled model"
    ):
        scale_model_(model, 2.0)
    torch.testing.assert_close(parameters(model), scaled, rtol=0, atol=0)


@pytest.mark.parametrize("scale", [0.0, -1.5, math.inf, math.nan])
def test_impossible_scales_are_refused(scale):
    with pytest.raises(ValueError, match="finite and above 0"):
        scale_model_(dense_model(), scale)


def test_unknown_architecture_is_named_with_the_known_ones():
    config = AutoConfig.for_model("gpt2", n_embd=8, n_layer=1, n_head=2, vocab_size=16)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"'gpt2'.*llama, mistral, .*qwen2.*uaq_scale=1\.0"):
        scale_model_(model, 1.5)
    assert scale_model_(model, 1.0) is False


def fuse_gate_and_up(layer):
    layer.mlp.gate_up_proj = nn.Linear(32, 80)
    del layer.mlp.up_proj


def store_as_int8(layer):
    layer.mlp.gate_proj.weight = nn.Parameter(
        torch.zeros(40, 32, dtype=torch.int8), requires_grad=False
    )


@pytest.mark.parametrize(
    ("break_layer", "message"),
    [
        (fuse_gate_and_up, r"layers\.1\.mlp\.up_proj.*fused"),
        (
            lambda layer: setattr(layer.self_attn.v_proj.weight, "data", torch.empty(0)),
            r"layers\.1\.self_attn\.v_proj.*not in memory",
        ),
        (lambda layer: layer.mlp.gate_proj.to("meta"), r"layers\.1\.mlp\.gate_proj.*not in memory"),
        (store_as_int8, r"layers\.1\.mlp\.gate_proj.*int8"),
    ],
    ids=["fused", "empty shard", "on meta", "int8"],
)
def test_one_unusable_layer_stops_it_before_anything_changes(break_layer, message):
    model = dense_model()
    break_layer(model.model.layers[1])
    first_layer = parameters(model.model.layers[0])
    with pytest.raises(ValueError, match=message):
        scale_model_(model, 1.5)
    torch.testing.assert_close(parameters(model.model.layers[0]), first_layer, rtol=0, atol=0)
    assert recorded_scale(model) == 1.0


def test_no_layer_found_is_an_error():
    model = dense_model()
    for layer in model.model.layers:
        del layer.input_layernorm
    with pytest.raises(
        ValueError, match="which norm feeds which layer in LlamaForCausalLM, model type 'llama'"
    ):
        scale_model_(model, 1.5)


def test_adapters_are_refused():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match=r"PEFT.*uaq_scale=1\.0"):
        scale_model_(peft.get_peft_model(dense_model(), lora), 1.5)
    injected = dense_model()
    injected.add_adapter(lora)
    with pytest.raises(ValueError, match="without adapters"):
        scale_model_(injected, 1.5)


def trainer(model, folder, callback):
    dataset = [{"input_ids": row, "labels": row} for row in IDS.repeat(4, 1)]
    args = TrainingArguments(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=2, save_steps=1, learning_rate=1e-2,
        lr_scheduler_type="constant", use_cpu=True, report_to=[], disable_tqdm=True, seed=0,
    )  # fmt: skip
    return Trainer(
        model=model, args=args, train_dataset=dataset, callbacks=[callback] if callback else None
    )


def test_resuming_does_not_scale_again(tmp_path):
    start = dense_model("qwen2")
    callback = UpdateAwareQuantizationCallback(1.5)
    straight = trainer(copy.deepcopy(start), tmp_path / "straight", callback)
    straight.train()
    resumed = trainer(copy.deepcopy(start), tmp_path / "resumed", callback)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-1"))
    assert resumed.state.global_step == straight.state.global_step == 2
    torch.testing.assert_close(parameters(resumed.model), parameters(straight.model))
    checkpoint = AutoModelForCausalLM.from_pretrained(tmp_path / "straight" / "checkpoint-2")
    assert recorded_scale(checkpoint) == 1.5


def test_a_callback_added_too_late_is_an_error(tmp_path):
    late = trainer(dense_model(), tmp_path, None)
    late.add_callback(UpdateAwareQuantizationCallback(1.5))
    with pytest.raises(RuntimeError, match=r"callbacks=\[\.\.\.\]"):
        late.train()
