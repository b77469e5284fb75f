"""What the engine holds is what the policy is: real TRL, real vLLM, real kernels, in both modes."""

import json

import pytest
import torch
from conftest import needs_avx512, selected, vllm_server
from support.training import ADAPTER, SAME, assert_metrics, assert_synced
from tiny import ENGINE, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.vllm

# On CPUs with AMX vLLM keeps the biases of its small BF16 layers in float32. What a sync brings in float32 stays so
# there, where a fresh engine has rounded it to BF16 first. Weights in 4 bits are multiplied in BF16.
SAME_BF16 = 8e-3 if torch.cpu._is_amx_tile_supported() else SAME

FP8_CACHE = {"sync_check_interval": 1, "vllm_engine_kwargs": ENGINE | {"kv_cache_dtype": "fp8"}}

MIXED = {"re:.*down_proj": "w4a16", "re:.*layers.0.*o_proj": "none", "*": "int8"}

COLOCATED = {
    "int8": ({}, []),
    "int8, LoRA": ({}, ["--lora"]),
    "int8, untied head": ({}, ["--untied"]),
    "int8, checkpoint per step": ({"weight_sync": "checkpoint"}, []),
    "int8, llm-compressor per step": ({"weight_sync": "llmcompressor"}, []),
    "int8, one matrix ignored": ({"quantization_ignore": ["lm_head", "re:.*layers.0.*down_proj"]}, []),
    "fp8": ({"rollout_quantization": "fp8"}, []),
    "w4a16": ({"rollout_quantization": "w4a16", "sync_check_interval": 1}, []),
    "w4a16, LoRA on values": ({"rollout_quantization": "w4a16"}, ["--lora", "--lora-targets", "v_proj"]),
    "w4a16 and int8": ({"rollout_quantization": MIXED}, []),
    "w4a16 and int8, adapter, rounded": (ADAPTER | {"rollout_quantization": MIXED, "round_base": True}, ["--lora"]),
    "int8, with the head": ({"quantization_ignore": [], "sync_check_interval": 1}, ["--untied"]),
    "w4a16, with the head": (
        {"rollout_quantization": "w4a16", "quantization_ignore": [], "sync_check_interval": 1},
        ["--untied"],
    ),
    "int8, FP8 cache": (FP8_CACHE, []),
    "bf16, FP8 cache": (FP8_CACHE | {"rollout_quantization": None}, []),
    "bf16": ({"rollout_quantization": None}, []),
    "bf16, LoRA": ({"rollout_quantization": None}, ["--lora"]),
    "int8, LoRA on values": ({}, ["--lora", "--lora-targets", "v_proj"]),
    "int8, adapter": (ADAPTER, ["--lora"]),
    "int8, adapter, rounded": (ADAPTER | {"round_base": True}, ["--lora"]),
    "w4a16, adapter on values": (ADAPTER | {"rollout_quantization": "w4a16"}, ["--lora", "--lora-targets", "v_proj"]),
    "w4a16, adapter, rounded": (ADAPTER | {"rollout_quantization": "w4a16", "round_base": True}, ["--lora"]),
    "bf16, adapter": (ADAPTER | {"rollout_quantization": None}, ["--lora", "--untied"]),
}

CORNERS = (
    *("int8, LoRA on values", "bf16, FP8 cache", "bf16, LoRA", "int8, adapter, rounded"),
    *("w4a16, LoRA on values", "w4a16, with the head", "w4a16, adapter on values", "int8, with the head"),
    "w4a16 and int8, adapter, rounded",
)
"""Cases of which each half is in another one."""


def cases(names):
    marks = {name: [pytest.mark.slow] * (name in CORNERS) for name in names}
    for name in names:
        marks[name] += [needs_avx512] * name.startswith("w4a16") + [needs_avx512] * ("FP8 cache" in name)
    return [pytest.param(name, marks=marks[name]) for name in names]


def assert_sends_everything(record):
    sent = {row["sync/sent_mb"] for row in record["history"] if "sync/sent_mb" in row}
    assert sent == {record["whole_mb"]}


@pytest.fixture(scope="module")
def colocated(request, train, run_scenario, tmp_path_factory):
    """Each case's training record, and what an engine started from the checkpoint of the same weights says."""
    wanted = selected(request, "case")
    chosen = {case: given for case, given in COLOCATED.items() if (case,) in wanted}
    directory = tmp_path_factory.mktemp("colocated")
    checkpoints = [directory / f"checkpoint {number}" for number in range(len(chosen))]
    records = train(
        *(
            [directory / "out", "--export", checkpoint, "--config", json.dumps(config), *arguments]
            for checkpoint, (config, arguments) in zip(checkpoints, chosen.values(), strict=True)
        )
    )
    engines = [
        f"{checkpoint}@fp8" if "FP8 cache" in case else checkpoint
        for case, checkpoint in zip(chosen, checkpoints, strict=True)
    ]
    return dict(zip(chosen, zip(records, run_scenario("fresh_engine.py", *engines), strict=True), strict=True))


@pytest.mark.xdist_group("colocated")
@pytest.mark.parametrize("case", cases(COLOCATED))
def test_colocated_engine_holds_the_trained_weights(case, colocated):
    config, arguments = COLOCATED[case]
    record, fresh = colocated[case]
    if "sync_check_interval" in config:
        assert any("sync/probe_ratio" in row for row in record["history"]) == ("FP8 cache" not in case)
    formats = config.get("rollout_quantization", "int8")
    is_bf16 = formats is None or "w4a16" in formats or isinstance(formats, dict)
    assert_synced(record, fresh, lora="--lora" in arguments, tolerance=SAME_BF16 if is_bf16 else SAME)
    assert_sends_everything(record)
    assert_metrics(record["history"], "w4a16" if isinstance(formats, dict) else formats)


@pytest.mark.xdist_group("server")
def test_server_holds_the_trained_weights(int8_server, train, run_scenario, tmp_path):
    config = {"vllm_mode": "server", "vllm_server_base_url": int8_server.url, "sync_check_interval": 1}
    config["rollout_checkpoint_dir"] = str(tmp_path)
    unchecked = config | {"sync_check_interval": 16}
    records = train(
        [tmp_path / "out", "--config", json.dumps(config), "--export", tmp_path / "full"],
        [tmp_path / "out", "--config", json.dumps(unchecked), "--export", tmp_path / "merged", "--lora"],
    )
    fresh = run_scenario("fresh_engine.py", tmp_path / "full", tmp_path / "merged")
    for lora in (False, True):
        assert_synced(records[lora], fresh[lora], lora)
        assert_sends_everything(records[lora])
        assert_metrics(records[lora]["history"], "int8")
    assert not [*tmp_path.glob("trl-qurl-*/[0-9]")], "checkpoints were left"


@pytest.mark.xdist_group("server")
def test_rloo_samples_from_a_server(int8_server, train, tmp_path):
    config = {"vllm_mode": "server", "vllm_server_base_url": int8_server.url, "sync_check_interval": 1}
    config |= {"beta": 0.0, "max_steps": 2, "rollout_checkpoint_dir": str(tmp_path)}
    [record] = train([tmp_path / "out", "--rloo", "--config", json.dumps(config)])
    [rollout] = [row for row in record["history"] if "reward" in row]
    assert 0 < rollout["mismatch/kl_k3"] < 0.01 and rollout["time/sync_check_s"] > 0


@pytest.mark.xdist_group("server")
@pytest.mark.parametrize("arguments", [[], ["--lora"]], ids=["full", "LoRA"])
def test_server_takes_llmcompressors_checkpoint_of_each_step(arguments, int8_server, train, run_scenario, tmp_path):
    """llm-compressor writes float32 where the policy is; the server computes in bfloat16. Every sync is digested."""
    config = {
        "vllm_mode": "server",
        "vllm_server_base_url": int8_server.url,
        "weight_sync": "llmcompressor",
        "sync_check_interval": 1,
        "rollout_checkpoint_dir": str(tmp_path / "rollouts"),
    }
    [record] = train([tmp_path / "out", "--config", json.dumps(config), "--export", tmp_path / "end", *arguments])
    [fresh] = run_scenario("fresh_engine.py", tmp_path / "end")
    assert_synced(record, fresh, lora="--lora" in arguments)


@pytest.mark.xdist_group("server")
@pytest.mark.parametrize(("formats", "here"), [("fp8", "fp8"), ({"re:.*down_proj": "w4a16", "*": "int8"}, "w4a16")])
def test_server_in_other_formats_is_refused(formats, here, int8_server, train, tmp_path):
    config = {"vllm_mode": "server", "vllm_server_base_url": int8_server.url, "rollout_quantization": formats}
    message = rf"first model.layers.0.mlp.down_proj.weight_scale \({here}, shape .* here and int8, shape .* there\)"
    with pytest.raises(AssertionError, match=message):
        train([tmp_path / "out", "--config", json.dumps(config)])


@pytest.mark.slow
@needs_avx512
def test_server_of_several_formats(warm_python, train, run_scenario, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    arguments = ("--scheme", json.dumps(MIXED))
    with vllm_server(tmp_path / "model", tmp_path, *arguments, python=warm_python, has_worker=True) as server:
        config = {"vllm_mode": "server", "vllm_server_base_url": server.url, "sync_check_interval": 1}
        config |= {"rollout_quantization": MIXED, "rollout_checkpoint_dir": str(tmp_path)}
        [record] = train([tmp_path / "out", "--config", json.dumps(config), "--export", tmp_path / "full"])
        config["rollout_quantization"] = {"re:.*down_proj": "w4a16", "*": "int8"}
        message = r"first model.layers.0.self_attn.o_proj.weight_scale \(int8, shape .* here and none there\)"
        with pytest.raises(AssertionError, match=message):
            train([tmp_path / "out", "--config", json.dumps(config)])
    [fresh] = run_scenario("fresh_engine.py", tmp_path / "full")
    assert_synced(record, fresh, tolerance=SAME_BF16)


LEFT_OUT = {
    "layers.1.mlp.down_proj": "RowParallelLinear",
    "layers.0.input_layernorm": "RMSNorm",
    "embed_tokens": "VocabParallelEmbedding",
}


@pytest.mark.xdist_group("colocated")
def test_a_layer_left_without_new_weights_is_an_error(run_scenario, tmp_path):
    messages = run_scenario("partial_sync.py", tmp_path / "checkpoint", *LEFT_OUT)
    for left_out, layer in LEFT_OUT.items():
        assert messages[left_out] is not None, "the engine kept old weights and said nothing"
        assert f"no new weights for 1 of its layers ({layer})" in messages[left_out]
