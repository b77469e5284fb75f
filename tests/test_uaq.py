"""Update-aware quantization keeps every known architecture's function, acts once, and refuses other
models.
"""

import math
import re
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.dense_models import IDS, VARIANTS, dense_model, logits
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from trl_qurl.quantization.uaq import recorded_scale, scale_model_
from trl_qurl.trainers.callbacks import UpdateAwareQuantizationCallback


def parameters(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("scale", [1.5, 0.7])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_do_not_change(variant, scale):
    model = dense_model(variant)
    before = logits(model)
    names = [name for name, _ in model.named_parameters() if re.search("q(kv)?_proj.weight", name)]
    weight = model.get_parameter(names[0])
    largest = weight.max().item()
    assert scale_model_(model, scale) is True
    assert recorded_scale(model) == scale
    assert weight.max().item() == pytest.approx(largest / scale)
    change = (logits(model) - before).abs().max()
    assert change < 1e-5 * before.abs().max()


def mlp_norm(variant):
    if variant.startswith("cohere"):
        return "input_layernorm"
    if variant in ("gemma2", "gemma3_text"):
        return "pre_feedforward_layernorm"
    return "post_attention_layernorm"


@pytest.mark.parametrize("variant", VARIANTS)
def test_gains_double_their_layers_halve_and_nothing_else_changes(variant):
    # Unchanged: biases, o_proj, down_proj, q/k norms, norms after a block, the last norm, embedding
    # and head.
    model = dense_model(variant)
    before = parameters(model)
    scale_model_(model, 2.0)
    offset = 1.0 if variant.startswith("gemma") else 0.0
    for name, parameter in model.named_parameters():
        expected = before[name]
        if re.search(
            r"layers\.\d\.(self_attn\.(q|k|v|qkv)_proj|mlp\.(gate|up|gate_up)_proj)\.weight", name
        ):
            expected = expected / 2
        elif re.search(rf"layers\.\d\.(input_layernorm|{mlp_norm(variant)})\.weight", name):
            expected = 2 * expected + offset  # 2 (offset + w) − offset
        assert torch.equal(parameter, expected), name


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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scale_model_(model, scale)
    assert [warning.filename for warning in caught] == ([] if is_exact else [__file__])
    assert is_exact or re.search(f'{dtype}.*"dtype": "float32"', str(caught[0].message))


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


def empty_the_shard(layer):
    layer.self_attn.v_proj.weight.data = torch.empty(0)


def store_as_int8(layer):
    codes = torch.zeros(40, 32, dtype=torch.int8)
    layer.mlp.gate_proj.weight = nn.Parameter(codes, requires_grad=False)


@pytest.mark.parametrize(
    ("break_layer", "message"),
    [
        (fuse_gate_and_up, r"layers\.1\.mlp\.up_proj.*fused"),
        (empty_the_shard, r"layers\.1\.self_attn\.v_proj.*not in memory"),
        (store_as_int8, r"layers\.1\.mlp\.gate_proj.*int8"),
    ],
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
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    with pytest.raises(ValueError, match=r"PEFT.*uaq_scale=1\.0"):
        scale_model_(get_peft_model(dense_model(), lora), 1.5)
    injected = dense_model()
    injected.add_adapter(lora)
    with pytest.raises(ValueError, match="without adapters"):
        scale_model_(injected, 1.5)


def test_a_callback_added_too_late_is_an_error(tmp_path):
    """What is added in time is resumed in test_resume.py."""
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], max_steps=1)
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    late = Trainer(dense_model(), args, train_dataset=rows)
    late.add_callback(UpdateAwareQuantizationCallback(1.5))
    with pytest.raises(RuntimeError, match=r"callbacks=\[\.\.\.\]"):
        late.train()
