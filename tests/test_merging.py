"""Adapters merged into copies: their values, and a policy that stays unchanged."""

import copy
import functools

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_config, get_peft_model
from support.building import build, start_no_engine
from tiny import stream_of, tiny_mixture, tiny_model

from trl_qurl import QuRLGRPOTrainer
from trl_qurl.quantization import SCHEMES
from trl_qurl.quantization.checkpoint_form import parameter_name
from trl_qurl.quantization.merging import model_parameters
from trl_qurl.rollout.checks.fingerprint import fingerprint
from trl_qurl.rollout.checks.tied_head import check_tied_head
from trl_qurl.trainers.checks.arguments import MERGED


def lora(**settings):
    return LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False} | settings
    )


OTHERS = {kind: {"init_weights": False} for kind in sorted({*MERGED.split()} - {"LORA", "IA3"})}
OTHERS |= {"OFT": {"r": 0, "oft_block_size": 8, "init_weights": False}, "C3A": {"block_size": 8}}
KINDS = {
    "LoRA": (tiny_model, lora()),
    "rank-stabilized": (tiny_model, lora(use_rslora=True, alpha_pattern={"q_proj": 7})),
    "DoRA": (tiny_model, lora(use_dora=True)),
    "biases": (tiny_model, lora(target_modules=["q_proj"], lora_bias=True)),
    "IA3": (
        tiny_model,
        IA3Config(target_modules=["q_proj"], feedforward_modules=[], init_ia3_weights=False),
    ),
    **{
        kind: (
            tiny_model,
            get_peft_config({"peft_type": kind, "target_modules": ["q_proj", "down_proj"]} | given),
        )
        for kind, given in OTHERS.items()
    },
    "experts": (
        lambda **kwargs: tiny_mixture("qwen3_moe", **kwargs),
        lora(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_merged_in_float32_without_changing_the_policy(kind, dtype):
    make, config = KINDS[kind]
    model = get_peft_model(make(dtype=dtype), config)
    before = copy.deepcopy(model.state_dict())
    merged = dict(model_parameters(model, merges=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    expected = dict(copy.deepcopy(model).float().merge_and_unload().named_parameters())
    base = {
        parameter_name(name): p
        for name, p in model.get_base_model().named_parameters()
        if ".base_layer." in name
    }
    assert merged.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name].to(dtype)) for name, tensor in merged.items())
    assert any(not torch.equal(merged[name], tensor) for name, tensor in base.items()), (
        "nothing was merged"
    )


def test_modules_of_the_active_adapter_are_sent():
    """TRL adds a reference adapter for a KL penalty."""
    model = get_peft_model(tiny_model(), lora(modules_to_save=["norm"]), adapter_name="math")
    model.add_adapter("ref", model.peft_config["math"])
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            parameter.data.fill_(2.0 if ".math." in name else 3.0)
    sent = list(model_parameters(model, merges=True))
    assert [name for name, _ in sent] == [name for name, _ in tiny_model().named_parameters()]
    assert torch.equal(dict(sent)["model.norm.weight"], torch.full((128,), 2.0))
    assert list(stream_of(model, SCHEMES["int8"]).form.layout) == [name for name, _ in sent]


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

APART = {
    "the head": {"modules_to_save": ["lm_head"]},
    "both": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "an adapter of the embedding": {"target_modules": ["embed_tokens"]},
}


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Builds a trainer that must not reach its engine."""
    monkeypatch.setattr("trl_qurl.rollout.engine.colocated.build_engine", start_no_engine)
    return functools.partial(build, QuRLGRPOTrainer, tmp_path / "out")


@pytest.mark.parametrize("kind", APART)
def test_a_tied_head_that_is_trained_apart_is_refused(kind, start):
    with pytest.raises(
        ValueError,
        match=r"lm_head\.weight and model\.embed_tokens\.weight are one tensor in the eng",
    ):
        start(peft_config=lora(**APART[kind]))


def test_fsdp_1_is_refused(start, monkeypatch):
    monkeypatch.setattr(
        "trl.distributed.DistributedBackend.__init__",
        lambda self, _: vars(self).update(zero_stage=0, fsdp_version=1),
    )
    with pytest.raises(
        ValueError,
        match="FSDP 1 does not expose single matrices to quantize: set fsdp_version to 2",
    ):
        start()


def test_heads_that_are_trained_alike_or_untied_are_accepted():
    untied = tiny_model(tie_word_embeddings=False)
    check_tied_head(get_peft_model(untied, lora(**APART["both"])).get_base_model())
    both = lora(modules_to_save=["lm_head", "embed_tokens"], ensure_weight_tying=True)
    check_tied_head(get_peft_model(tiny_model(), both).get_base_model())
    apart = tiny_model()
    apart.lm_head.weight = torch.nn.Parameter(apart.lm_head.weight.clone())
    with pytest.raises(ValueError, match="are one tensor in the engine"):
        check_tied_head(apart)
