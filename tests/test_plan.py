"""Several formats in one model: which layer gets which, what a checkpoint says, and what is
refused.
"""

import json

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny import WHOLE_BLOCKS, save_tiny, stream_of, tiny_mixture, tiny_model

from trl_qurl import cli
from trl_qurl.quantization import make_plan
from trl_qurl.quantization.checks.kv_cache import has_large_keys
from trl_qurl.quantization.plan import read_formats, require_formats

MIXED = {"re:.*down_proj": "w4a16", "re:.*layers.0.*(gate|up)_proj": "none", "*": "int8"}


def targets_of(plan):
    found = {}
    for scheme, targets in plan.targets.items():
        found[scheme.name] = list(targets)
    return found


def test_the_first_pattern_that_matches_decides():
    plan = make_plan(tiny_model(**WHOLE_BLOCKS), MIXED)
    for layer, scheme in plan.schemes.items():
        assert scheme.name == ("w4a16" if "down_proj" in layer else "int8")
    assert len(plan.schemes) == 12
    assert "model.layers.0.mlp.up_proj" not in plan.schemes
    assert targets_of(plan) == {"w4a16": ["re:.*down_proj"], "int8": ["Linear"]}
    assert plan.ignore == ("lm_head", "re:.*layers.0.*(gate|up)_proj")
    assert plan.quantization_config()["format"] == "mixed-precision"


def test_patterns_that_overlap_are_written_as_names():
    """vLLM would match the second pattern with the name of the fused layer, `qkv_proj`."""
    fused = r"re:.*attn\.[qkv]_proj$"
    outputs = ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"]
    plan = make_plan(tiny_model(), {fused: "fp8", "re:.*self_attn": "int8"})
    assert targets_of(plan) == {"fp8": [fused], "int8": outputs}
    kept = make_plan(tiny_model(), {fused: "fp8", "re:.*self_attn": "none", "*": "fp8"})
    assert list(kept.ignore) == ["lm_head", *outputs]
    assert len(kept.schemes) == 12


def test_one_format_is_written_as_before_however_it_is_given():
    model = tiny_model(tie_word_embeddings=False)
    plain = make_plan(model, "int8", ["lm_head", "re:.*down_proj"])
    same = make_plan(model, '{"re:.*down_proj": null, "*": "int8"}')
    assert same.quantization_config() == plain.quantization_config()
    assert plain.quantization_config()["config_groups"]["group_0"]["targets"] == ["Linear"]
    for nothing in (None, "none", {}, {"*": "none"}):
        assert make_plan(model, nothing).quantization_config() is None


# Formats, and what the message names.
REFUSED = yaml.safe_load(r"""
unknown name: [{"*": int9}, "'int9'", "'int8'"]
no layer: [{"re:.*down_porj": fp8, "*": int8}, "'re:.*down_porj'", no layer of Qwen2]
comes too late: [{"*": int8, "re:.*down_proj": fp8}, "'re:.*down_proj'", earlier patterns]
no regex: [{"re:(": fp8}, rollout_quantization, "'re:('"]
no JSON: ['{"*": int8}', JSON, "{"]
nested: [{"*": {a: int8}}, "rollout_quantization is {'a': 'int8'}", int8]
YAML's off: [off, rollout_quantization is False, "'none'"]
fused: [{"re:.*q_proj": fp8, "*": int8}, self_attn.q_proj is in fp8, --scheme]
fused, 16 bits: [{"re:.*up_proj": none, "*": int8}, mlp.up_proj is in 16 bits, --ignore]
tied head: [{lm_head: int8}, "'lm_head'", no layer]
head: [{"re:.*lm_head": fp8_block, "*": int8}, fp8_block, lm_head, 1 of the 15 layers]
a number: [{1: int8}, rollout_quantization has the pattern 1]""")


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_planned_is_refused(case):
    formats, *named = REFUSED[case]
    is_tied = case != "head"
    ignore = ["lm_head"] if is_tied else []
    with pytest.raises(ValueError) as error:
        make_plan(tiny_model(tie_word_embeddings=is_tied), formats, ignore)
    for part in named:
        assert part in str(error.value)


def test_keys_with_biases_and_no_norm_are_large():
    model = tiny_model("qwen2")
    assert has_large_keys(model)
    assert has_large_keys(get_peft_model(model, LoraConfig(target_modules=["k_proj"])))
    assert has_large_keys(tiny_mixture("qwen2_moe"))
    assert not has_large_keys(tiny_model("llama"))
    assert not has_large_keys(tiny_model("qwen3", attention_bias=True)), "its keys have a norm"


def test_a_head_that_shares_its_weight_stays_in_16_bits():
    make_plan(tiny_model(), {"lm_head": "none", "*": "int8"}, [])
    with pytest.raises(ValueError, match="lm_head shares its weight with the embedding"):
        make_plan(tiny_model(), "int8", [])


def test_something_must_be_quantized():
    with pytest.raises(ValueError, match=r"quantization_ignore=.*re:.\*layers.* 14 linear layers"):
        make_plan(tiny_model(), "int8", ["lm_head", "re:.*layers.*"])
    for nothing in (None, "none"):
        with pytest.raises(ValueError, match=f"--scheme is {nothing!r}.* int8"):
            require_formats(nothing, "--scheme")


def test_a_pattern_to_ignore_must_match_something():
    """Except the default: some models name their head otherwise. The example is the nearest layer,
    never the head.
    """
    model = tiny_model(tie_word_embeddings=False)
    nearest = {"model.layers.1.mlp.down_porj": "1.mlp.down_proj", "x": "0.self_attn.q_proj"}
    for pattern, near in nearest.items():
        said = rf"quantization_ignore \(--ignore\) .*'{pattern}'.*'model.layers.{near}"
        with pytest.raises(ValueError, match=said):
            make_plan(model, "int8", ["lm_head", pattern])
    make_plan(model.model, "int8", ["lm_head", "embed_tokens"])  # without a head


@pytest.mark.parametrize("pattern", ["lm_head", r"re:.*\.experts\.", "re:.*self_attn"])
def test_a_pattern_for_16_bits_may_match_any_module(pattern):
    make_plan(tiny_mixture("qwen3_moe"), {pattern: "none", "re:.*(self_attn|experts)": "int8"})


def test_experts_of_a_block_share_a_format():
    model = tiny_mixture("mixtral", **WHOLE_BLOCKS)
    plan = make_plan(model, {r"re:.*\.experts\.": "w8a16", "*": "int8"})
    formats = {scheme.name for layer, scheme in plan.schemes.items() if ".experts." in layer}
    assert formats == {"w8a16"}
    said = r"vLLM fuses .*experts.0.* is in int8, .*experts.1.down_proj is in w8a16"
    with pytest.raises(ValueError, match=said):
        make_plan(model, {r"re:.*experts\.1\.": "w8a16", "*": "int8"})


def test_only_layers_in_int8_are_smoothed():
    model = tiny_model("llama", **WHOLE_BLOCKS)
    weights = stream_of(model, {"re:.*self_attn": "w4a16", "*": "int8"}, smooths=True)
    sources = {name.rpartition(".")[2] for name in weights.smoothing._sources}
    assert sources == {"post_attention_layernorm", "up_proj"}


def test_the_command_line_takes_a_json_object(tmp_path, capsys):
    save_tiny(tmp_path / "model", **WHOLE_BLOCKS)
    paths = [str(tmp_path / name) for name in ("model", "out")]
    assert cli.main(["quantize", *paths, "--scheme", json.dumps(MIXED)]) == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.layers.0.mlp.down_proj.weight_packed" in tensors
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == torch.int8
    assert "W4A16-INT8 checkpoint written to" in capsys.readouterr().out
    assert read_formats("NONE") is None
