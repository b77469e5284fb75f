"""Adapters merged into copies: their values, and a policy that stays unchanged."""

import copy
import functools

import pytest
import torch
import yaml
from peft import IA3Config, LoraConfig, get_peft_config, get_peft_model
from support.building import build, start_no_engine
from tiny import stream_of, tiny_mixture, tiny_model

from trl_qurl import QuRLGRPOTrainer
from trl_qurl.quantization.checkpoint_form import parameter_name
from trl_qurl.quantization.merging import model_parameters
from trl_qurl.rollout.checks.fingerprint import fingerprint
from trl_qurl.rollout.checks.tied_head import check_tied_head
from trl_qurl.trainers.checks.arguments import MERGED


def lora(**settings):
    defaults = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    return LoraConfig(**defaults | settings)


KINDS = {
    "LoRA": lora(),
    "rank-stabilized": lora(use_rslora=True, alpha_pattern={"q_proj": 7}),
    "DoRA": lora(use_dora=True),
    "biases": lora(target_modules=["q_proj"], lora_bias=True),
    "IA3": IA3Config(target_modules=["q_proj"], feedforward_modules=[], init_ia3_weights=False),
    "experts": lora(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
}
OTHERS = {
    "OFT": {"r": 0, "oft_block_size": 8, "init_weights": False},
    "C3A": {"block_size": 8},
}
for other in sorted({*MERGED.split()} - {"LORA", "IA3"}):
    given = OTHERS.get(other, {"init_weights": False})
    given |= {"peft_type": other, "target_modules": ["q_proj", "down_proj"]}
    KINDS[other] = get_peft_config(given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_merged_in_float32_without_changing_the_policy(kind, dtype):
    plain = tiny_mixture("qwen3_moe", dtype) if kind == "experts" else tiny_model(dtype=dtype)
    model = get_peft_model(plain, KINDS[kind])
    before = copy.deepcopy(model.state_dict())
    merged = dict(model_parameters(model, merges=True))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    whole = copy.deepcopy(model).float().merge_and_unload()
    expected = {name: p.to(dtype) for name, p in whole.named_parameters()}
    torch.testing.assert_close(merged, expected, rtol=0, atol=0)
    base = model.get_base_model().named_parameters()
    adapted = ((parameter_name(name), p) for name, p in base if ".base_layer." in name)
    assert any(not torch.equal(merged[name], p) for name, p in adapted), "nothing was merged"


def test_modules_of_the_active_adapter_are_sent():
    """TRL adds a reference adapter for a KL penalty."""
    model = get_peft_model(tiny_model(), lora(modules_to_save=["norm"]), adapter_name="math")
    model.add_adapter("ref", model.peft_config["math"])
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            parameter.data.fill_(2.0 if ".math." in name else 3.0)
    sent = list(model_parameters(model, merges=True))
    names = [name for name, _ in tiny_model().named_parameters()]
    assert [name for name, _ in sent] == names
    assert dict(sent)["model.norm.weight"].unique().tolist() == [2.0]
    assert list(stream_of(model, "int8").form.layout) == names


CHANGES = {
    "one value": lambda p: p.detach().view(-1)[1].add_(1e-3),
    "one bit of averages": lambda p: p.data.view(torch.uint8).view(-1)[-4].bitwise_xor_(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_fingerprint_changes_with_weights(change):
    model = tiny_model()
    before = fingerprint(model)
    model(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert fingerprint(model) == before
    CHANGES[change](model.model.layers[1].mlp.up_proj.weight)
    assert fingerprint(model) != before


def test_fingerprint_reads_the_shard_of_a_parameter_that_is_empty():
    """As under ZeRO-3."""
    model = tiny_model()
    parameter = model.model.layers[0].mlp.up_proj.weight
    parameter.ds_tensor = parameter.data.flatten()[1:101].clone()
    parameter.data = torch.empty(0)
    before = fingerprint(model)
    parameter.ds_tensor[50].add_(1e-3)
    assert fingerprint(model) != before


def test_fingerprint_changes_with_adapters():
    model = get_peft_model(tiny_model(), lora(modules_to_save=["norm"]))
    model.add_adapter("other", model.peft_config["default"])
    model.base_model.model.model.norm.modules_to_save["default"].weight.data.fill_(2.0)
    before = fingerprint(model)
    with model.disable_adapter():
        assert fingerprint(model) != before
    assert fingerprint(model) == before
    layer = model.base_model.model.model.layers[1].mlp.down_proj
    layer.scaling["default"] *= 10
    assert fingerprint(model) != before
    layer.scaling["default"] /= 10
    model.set_adapter("other")
    assert fingerprint(model) != before


# What cannot be sent
# -------------------------------------------------------------------------------------------------

APART = yaml.safe_load("""
the head: {modules_to_save: [lm_head]}
both: {modules_to_save: [lm_head, embed_tokens]}
an adapter of the embedding: {target_modules: [embed_tokens]}""")


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Builds a trainer that must not reach its engine."""
    monkeypatch.setattr("trl_qurl.rollout.engine.colocated.build_engine", start_no_engine)
    return functools.partial(build, QuRLGRPOTrainer, tmp_path / "out")


@pytest.mark.parametrize("kind", APART)
def test_a_tied_head_that_is_trained_apart_is_refused(kind, start):
    said = r"lm_head\.weight and model\.embed_tokens\.weight are one tensor in the eng"
    with pytest.raises(ValueError, match=said):
        start(peft_config=lora(**APART[kind]))


def test_fsdp_1_is_refused(start, monkeypatch):
    monkeypatch.setattr(
        "trl.distributed.DistributedBackend.__init__",
        lambda self, _: vars(self).update(zero_stage=0, fsdp_version=1),
    )
    said = "FSDP 1 does not expose single matrices to quantize: set fsdp_version to 2"
    with pytest.raises(ValueError, match=said):
        start()


def test_heads_that_are_trained_alike_or_untied_are_accepted():
    untied = tiny_model(tie_word_embeddings=False)
    check_tied_head(get_peft_model(untied, lora(**APART["both"])).get_base_model())
    both = lora(**APART["both"], ensure_weight_tying=True)
    check_tied_head(get_peft_model(tiny_model(), both).get_base_model())
    apart = tiny_model()
    apart.lm_head.weight = torch.nn.Parameter(apart.lm_head.weight.clone())
    with pytest.raises(ValueError, match="are one tensor in the engine"):
        check_tied_head(apart)
