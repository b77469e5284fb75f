"""Sent tensors have the names and cuts of a checkpoint: the model's own, or llm-compressor's for
experts.
"""

import json
from contextlib import nullcontext

import pytest
import torch
from accelerate import PartialState
from compressed_tensors.utils import is_match
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny import (
    MIXTURES,
    SIXTEEN_BIT_EXPERTS,
    layers_of,
    rollout_settings,
    save_remote_code_model,
    stream_of,
    tiny_mixture,
    tiny_model,
    write_with_llmcompressor,
)
from tiny_vision import VISION_FAMILIES, tiny_vision_model, vision_processor
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

from trl_qurl import cli
from trl_qurl.lab.comparison import fitting_formats
from trl_qurl.quantization import get_scheme, make_plan, write_checkpoint
from trl_qurl.quantization.checkpoint import load_model
from trl_qurl.quantization.checkpoint_form import CheckpointForm
from trl_qurl.quantization.layers import ignored_modules
from trl_qurl.quantization.merging import model_parameters
from trl_qurl.rollout.checks.adapter import adapter_obstacle, check_rounding
from trl_qurl.rollout.checks.hardware import check_cpu_build
from trl_qurl.rollout.preparation import plan_rollouts

ON_GPU = torch.cuda.is_available()


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def model_of(family):
    if family in MIXTURES:
        return tiny_mixture(family)
    if family in VISION_FAMILIES:
        return tiny_vision_model(family)
    return tiny_model(family)


@pytest.mark.parametrize("family", [*MIXTURES, *VISION_FAMILIES, "qwen2"])
def test_sent_tensors_are_those_of_the_models_checkpoint(family, tmp_path):
    model = model_of(family)
    form = CheckpointForm(model, splits_experts=False)
    sent = dict(form.convert(model_parameters(model)))
    model.save_pretrained(tmp_path)
    assert_same(sent, load_file(tmp_path / "model.safetensors"))
    layout = {}
    for held in form.layout.values():
        layout |= held
    assert layout.keys() == sent.keys()
    for name, tensor in sent.items():
        assert layout[name].shape == tensor.shape, name
        assert layout[name].dtype == tensor.dtype, name


# Experts
# --------------------------------------------------------------------------------------------------


MIXTURE_PLANS = [
    *((family, ["lm_head"]) for family in MIXTURES),
    ("mixtral", SIXTEEN_BIT_EXPERTS),
]


@pytest.mark.parametrize(("family", "ignore"), MIXTURE_PLANS)
def test_a_quantized_mixture_equals_llmcompressors(family, ignore, tmp_path):
    pytest.importorskip("llmcompressor", reason="compares with llm-compressor")
    written = []
    for write in (write_checkpoint, write_with_llmcompressor):
        model = tiny_mixture(family, torch.bfloat16)
        write(model, None, "int8", tmp_path / write.__name__, ignore=ignore)
        written.append(load_file(tmp_path / write.__name__ / "model.safetensors"))
    assert_same(*written)
    names = " ".join(written[0])
    assert "experts.3.up_proj.weight" in names
    assert ("experts.0.down_proj.weight_scale" in names) == (ignore == ["lm_head"])


@pytest.mark.parametrize("family", MIXTURES)
def test_routers_are_not_quantized(family):
    model = tiny_mixture(family)
    patterns = ignored_modules(model, [])
    assert ignored_modules(model, ["lm_head"]) == ["lm_head", *patterns]
    sent = stream_of(model, get_scheme("int8")).form.layout
    stored = {name.rpartition(".")[0] for name in sent}
    routers = []
    for name in stored - layers_of(model):
        if name.endswith(("gate", "router")):
            routers.append(name)
            # vLLM matches names of its own, which end alike
            assert is_match(name, nn.Linear(1, 1), tuple(patterns)), name
    assert len(routers) == {"qwen2_moe": 4, "glm4_moe": 1}.get(family, 2)


def test_a_format_without_a_kernel_for_this_cpu_is_refused_and_an_inexact_one_named(
    monkeypatch, caplog
):
    capabilities = {"avx2": True, "avx512_vnni": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    fitting_formats(tiny_model(), ["int8"], ["lm_head"], print)
    capabilities["avx512_vnni"] = False
    fitting_formats(tiny_model(), ["w8a16", "int8"], ["lm_head"], print)
    assert caplog.text.count("no VNNI") == (not ON_GPU)
    message = (
        "For W4A16, vLLM.s CPU build has kernels only for CPUs with avx512_f, which this one "
        "lacks: choose"
    )
    outcome = pytest.raises(ValueError, match=message)
    if ON_GPU:
        outcome = nullcontext()
    with outcome:
        check_cpu_build(tiny_model().config, {"layer": get_scheme("w4a16")})


@pytest.fixture(params=[False, True])
def has_amx(request, monkeypatch):
    capabilities = {"avx2": True, "amx_tile": request.param}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    return request.param


def test_experts_without_a_kernel_are_refused_with_the_pattern(has_amx):
    model = tiny_mixture("mixtral")
    check_cpu_build(model.config, make_plan(model, "int8", SIXTEEN_BIT_EXPERTS).schemes)
    check_cpu_build(model.config)
    outcome = nullcontext()
    if not has_amx and not ON_GPU:
        outcome = pytest.raises(ValueError, match=r"INT8 experts only on .* AMX, .* add 're:")
    with outcome:
        check_cpu_build(model.config, make_plan(model, "int8").schemes)


@pytest.mark.skipif(ON_GPU, reason="about vLLM's CPU build")
def test_experts_without_a_kernel_stay_in_16_bits(has_amx, caplog):
    """Unless a pattern asks for them, or a server runs them."""
    PartialState()  # for the log
    model = tiny_mixture("mixtral")

    def planned(formats="int8", **changed):
        return plan_rollouts(model, rollout_settings(formats, **changed)).schemes

    layers = planned()
    assert layers
    assert ("experts" in " ".join(layers)) == has_amx
    for said in ("only on CPUs with AMX", repr(SIXTEEN_BIT_EXPERTS)):
        assert (said in caplog.text) == (not has_amx)
    assert "experts" in " ".join(planned(vllm_mode="server"))
    assert "experts" in " ".join(planned({"*": "int8"}))


# Vision-language models
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_only_the_language_model_is_quantized(family, tmp_path):
    model = tiny_vision_model(family)
    language = []
    for name, module in model.get_decoder().named_modules():
        if isinstance(module, nn.Linear):
            language.append(name.partition("layers.")[2])
    write_checkpoint(model, None, "int8", tmp_path)
    quantized = []
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if tensor.dtype == torch.int8:
            quantized.append(name.partition("layers.")[2].removesuffix(".weight"))
    assert sorted(quantized) == sorted(language), "the vision tower has such layers, too"


@pytest.mark.parametrize("family", ["gemma3", "llava_next"])
def test_an_adapter_of_a_vision_language_model_is_merged(family):
    lora = LoraConfig(r=2, target_modules="all-linear", exclude_modules=".*vision_tower.*")
    model = get_peft_model(tiny_vision_model(family), lora)
    assert "vision-language models are untested" in adapter_obstacle(model)


def test_an_adapter_under_another_name_is_merged():
    """As in a checkpoint that was saved under a prefix, which transformers remembers."""
    model = tiny_model("llama")
    model._weight_conversions = [WeightRenaming("attention.", "self_attn.")]
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    assert "q_proj has a different name in the checkpoint" in adapter_obstacle(adapted)


def test_round_base_with_quantized_experts_is_refused():
    adapted = get_peft_model(tiny_mixture("mixtral"), LoraConfig(r=2, target_modules=["q_proj"]))
    scheme = get_scheme("int8")
    said = r"round_base=True does not round experts .*: add 're:.\*\\.experts\\.' to"
    with pytest.raises(ValueError, match=said):
        check_rounding(adapted, stream_of(adapted, scheme).plan)
    check_rounding(adapted, stream_of(adapted, scheme, SIXTEEN_BIT_EXPERTS).plan)


def test_a_vision_language_model_is_loaded_with_its_processor(tmp_path):
    tiny_vision_model("gemma3").save_pretrained(tmp_path)
    vision_processor("gemma3").save_pretrained(tmp_path)
    model, processor = load_model(str(tmp_path))
    assert type(model).__name__ == "Gemma3ForConditionalGeneration"
    assert type(processor).__name__ == "Gemma3Processor"


def test_remote_code_is_copied_if_it_is_used(tmp_path):
    save_remote_code_model(tmp_path / "model")
    options = f"{tmp_path}/model {tmp_path}/out --scheme int8 --trust-remote-code"
    assert cli.main(["quantize", *options.split()]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_own.InternLM3ForCausalLM"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(model).__name__ == "InternLM3ForCausalLM"


def test_remote_code_that_is_not_used_is_not_in_the_config(tmp_path):
    """TRL loads transformers' own class if there is one, even if the checkpoint has code."""
    save_remote_code_model(tmp_path / "model", "LlamaForCausalLM")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    write_checkpoint(model, None, "int8", tmp_path / "out")
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_checkpoints_that_fuse_parameters_are_refused():
    """As in some vision towers; here the model only declares it."""
    model = tiny_model("llama")
    fused = ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"]
    model._weight_conversions = [
        WeightConverter("self_attn.qkv.weight", fused, operations=[Chunk(dim=0)])
    ]
    said = r"checkpoint of LlamaForCausalLM holds .* together with other parameters"
    with pytest.raises(ValueError, match=said):
        CheckpointForm(model)
