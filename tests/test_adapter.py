"""Adapters that are sent alone: which ones can be, their files, and the rounded base below them."""

import copy
import json
import re
from typing import get_args

import pytest
import torch
import yaml
from accelerate import Accelerator
from conftest import needs_avx512
from documents import ROOT
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from support.dense_models import logits
from tiny import WHOLE_BLOCKS, layers_of, save_tiny, stream_of, tiny_model
from transformers import AutoModelForCausalLM
from vllm.config.lora import MaxLoRARanks
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from trl_qurl.quantization import SCHEMES, make_plan
from trl_qurl.quantization.checkpoint import CheckpointWriter
from trl_qurl.quantization.files import CACHE_VARIABLE
from trl_qurl.quantization.rounded_base import check_unrounded, round_base
from trl_qurl.quantization.storage import read_tensors
from trl_qurl.rollout.adapter import adapter_rank, adapter_tensors, engine_rank, write_adapter
from trl_qurl.rollout.checks.adapter import adapter_obstacle, choose_adapter
from trl_qurl.rollout.checks.tensors import base_digests
from trl_qurl.rollout.directory import CheckpointFolder
from trl_qurl.rollout.engine.launch import starting_checkpoint
from trl_qurl.rollout.errors import SyncError
from trl_qurl.rollout.group import APART, TOGETHER
from trl_qurl.rollout.routes import AdapterRoute


def adapted(model=None, **settings):
    torch.manual_seed(1)  # of an adapter that changes the model
    defaults = {"r": 4, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}
    config = LoraConfig(task_type="CAUSAL_LM", **defaults | settings)
    return get_peft_model(model or tiny_model(), config).eval()


# Which adapters can be sent
# ------------------------------------------------------------------------------------------


# settings of LoRA, and what the reason has to name
LORA_OBSTACLES = yaml.safe_load("""
- [{use_dora: true}, model.layers.0.self_attn.q_proj uses a LoRA variant]
- [{lora_bias: true}, lora_bias=True]
- [{modules_to_save: [lm_head]}, lm_head.weight is trained]
- [{target_parameters: [mlp.down_proj.weight]}, "target_parameters=['mlp"]
- [{target_modules: [q_proj, lm_head]}, it adapts lm_head]
- [{target_modules: [embed_tokens]}, it adapts model.embed_tokens]
- [{rank_pattern: {layers.1.self_attn.q_proj: 600}}, its rank 600]""")


@pytest.mark.parametrize(("settings", "named"), LORA_OBSTACLES)
def test_settings_of_lora_that_vllm_does_not_load(settings, named):
    assert named in adapter_obstacle(adapted(tiny_model(tie_word_embeddings=False), **settings))


def test_policies_without_exactly_one_lora_adapter():
    assert "no adapter" in adapter_obstacle(tiny_model())
    ia3 = IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    assert "IA3" in adapter_obstacle(get_peft_model(tiny_model(), ia3))


def test_a_second_adapter_that_becomes_active_is_named_at_the_next_sync():
    model = adapted()
    route = AdapterRoute(model, stream_of(model, SCHEMES["int8"]), APART)
    assert next(route.tensors())
    model.add_adapter("second", LoraConfig(r=2, target_modules=["v_proj"]))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(SyncError, match="no longer be sent alone: 2 adapters are active"):
        route.tensors()


SENDABLE = yaml.safe_load("""
patterns:
  rank_pattern: {q_proj: 2, layers.1.mlp.up_proj: 8}
  alpha_pattern: {layers.0.mlp.*: 5}
rank-stabilized, patterns:
  use_rslora: true
  rank_pattern: {layers.1.mlp.up_proj: 8}
  alpha_pattern: {q_proj: 3}
every linear layer:
  target_modules: all-linear
PiSSA, which changes the base:
  init_lora_weights: pissa""")


@pytest.mark.parametrize("kind", SENDABLE)
def test_a_written_adapter_computes_what_was_trained(kind, tmp_path):
    model = adapted(**SENDABLE[kind])
    assert adapter_obstacle(model) is None
    before = model.peft_config["default"].to_dict()
    write_adapter(model, adapter_tensors(model), tmp_path / "adapter")
    assert model.peft_config["default"].to_dict() == before
    trained = logits(model)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    # vLLM computes one scaling for all layers, from these three.
    assert config["lora_alpha"] / config["r"] == 1.0
    assert not config["use_rslora"]
    # vLLM compares it with the rank it was started for
    assert config["r"] <= engine_rank(adapter_rank(model))
    with model.disable_adapter():
        assert not torch.allclose(trained, logits(model), atol=1e-2), "the adapter does nothing"
    loaded = PeftModel.from_pretrained(model.unload(), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(loaded), trained, rtol=1e-5, atol=1e-5)


def test_the_documented_options_of_vllms_server_exist():
    """`test_adapter_server.py` starts an engine from a saved base with an adapter beside it."""
    page = (ROOT / "docs" / "after-training.md").read_text()
    command = re.search(r"`vllm serve (DIR --enable-lora [^`]+)`", page)[1]
    given = make_arg_parser(FlexibleArgumentParser()).parse_args(command.split())
    assert given.enable_lora
    assert given.max_lora_rank >= 8
    [served] = given.lora_modules
    assert served.name == "policy"
    assert served.path == "DIR/adapter"


def test_an_inactive_adapter_is_not_sent():
    model = adapted()
    expected = dict(adapter_tensors(model))
    model.add_adapter("reference", LoraConfig(r=300, target_modules=["v_proj", "q_proj"]))
    assert adapter_obstacle(model) is None
    assert adapter_rank(model) == 4
    torch.testing.assert_close(dict(adapter_tensors(model)), expected, rtol=0, atol=0)
    with model.disable_adapter():
        for name, tensor in adapter_tensors(model):
            if ".lora_B." in name:
                assert not tensor.any(), name


def test_engines_are_started_for_the_largest_rank():
    assert adapter_rank(adapted(rank_pattern={"q_proj": 9})) == 9
    # vLLM compares the config's r, not the layers'
    assert adapter_rank(adapted(r=16, rank_pattern={".*": 2})) == 16
    ranks = get_args(MaxLoRARanks)
    assert [engine_rank(rank) for rank in ranks] == list(ranks)
    assert engine_rank(2) == 8
    assert engine_rank(9) == 16
    assert engine_rank(300) == 320


# The decision
# --------------------------------------------------------------------------------------------------

DORA = "vLLM does not support DoRA"
# requested, obstacle, rank, the server's rank; whether it is sent alone, and what says why
DECISIONS = yaml.safe_load(f"""
- [[auto, null, 4, null], no, faster]
- [[auto, {DORA}, 0, null], no, {DORA}]
- [[adapter, null, 4, null], yes, weight_sync='adapter']
- [[auto, null, 4, 16], yes, server]
- [[checkpoint, null, 4, 0, START], no, "rank 4: start it"]""")


@pytest.mark.parametrize(("given", "takes", "reason"), DECISIONS)
def test_adapters_are_sent_where_they_can_be(given, takes, reason):
    decided, why = choose_adapter(*given)
    assert decided is takes
    assert reason in why


def test_an_adapter_that_cannot_be_sent_is_refused_on_request():
    # test_errors.py has refusals that depend on the server
    with pytest.raises(ValueError, match=f"weight_sync='adapter', round_base=True.*{DORA}"):
        choose_adapter("adapter", DORA, 0, None)


# The rounded base
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_a_rounded_base_equals_the_engines_dequantized_codes(scheme, dtype):
    original = tiny_model(dtype=torch.bfloat16, **WHOLE_BLOCKS).float()
    exact = {name: p.detach().clone() for name, p in original.named_parameters()}
    stream = stream_of(original, scheme)
    sent = dict(stream.tensors(iter(exact.items()), is_exact=True))
    model = adapted(original, target_modules=["q_proj"])
    layers = layers_of(model, scheme=scheme)
    base = model.get_base_model()
    round_base(base, make_plan(model, scheme.name), dtype)
    rounded = {name.replace(".base_layer", ""): p for name, p in base.named_parameters()}
    for name, weight in exact.items():
        layer = name.removesuffix(".weight")
        if layer not in layers:
            assert torch.equal(rounded[name], weight), name
            continue
        tensors = {}
        for sent_name, tensor in sent.items():
            owner, _, part = sent_name.rpartition(".")
            if owner == layer:
                tensors[part] = tensor
        # vLLM keeps scales of groups in its own dtype
        if scheme.checkpoint_format == "pack-quantized":
            tensors["weight_scale"] = tensors["weight_scale"].to(dtype).float()
        assert torch.equal(rounded[name], scheme.dequantize(tensors)), name
        assert not torch.equal(rounded[name], weight), name
    assert model.config.rounded_base == scheme.name


def test_a_base_is_rounded_once():
    model = tiny_model()
    check_unrounded(model)
    round_base(model, make_plan(model, "w4a16"), torch.float32)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"w4a16 before \(round_base\)"):
        round_base(model, make_plan(model, "w4a16"), torch.float32)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


# The base of a server
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", ["int8", pytest.param("w4a16", marks=needs_avx512)])
def test_a_server_of_the_same_model_has_the_same_base(scheme, dtype, head, tmp_path, monkeypatch):
    """Whatever dtype the trainer loads the model in; and it still has after the trainer's base was
    rounded.
    """
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    save_tiny(tmp_path / "model", dtype=torch.bfloat16, tie_word_embeddings=head == "tied")
    start = starting_checkpoint(str(tmp_path / "model"), scheme, ["lm_head"], {})
    served = base_digests(read_tensors(start), torch.bfloat16)

    def route_of(model):
        policy = adapted(model)
        weights = stream_of(policy, SCHEMES[scheme])
        writer = CheckpointWriter(policy.get_base_model(), None, weights.plan)
        parent = str(tmp_path / "rollouts")
        folder = CheckpointFolder(Accelerator(cpu=True), writer, parent, 0, is_served=True)
        route = AdapterRoute(policy, weights, TOGETHER, folder, rounds_base=True)
        route.attach(None, "bfloat16")
        return route

    route = route_of(AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype))
    assert route.digests == served
    assert route.checkpoint is not None
    saved = base_digests(route.starting_tensors(), torch.bfloat16)
    assert saved == served
    other = route_of(tiny_model(dtype=dtype, tie_word_embeddings=head == "tied", seed=1))
    assert other.digests.keys() == served.keys()
    assert other.digests != served
