"""After training, engines hold the policy's weights: real TRL, real vLLM, real kernels, in both
modes.
"""

import itertools
import json

import pytest
import torch
from conftest import needs_avx512, selected, vllm_server
from support.training import (
    ADAPTER,
    SAME,
    assert_metrics,
    assert_moved,
    assert_sends_everything,
    assert_synced,
    rollout_rows,
)
from tiny import ENGINE, save_tiny

pytestmark = pytest.mark.vllm

# On CPUs with AMX vLLM keeps the biases of its small BF16 layers in float32. A sync in float32
# leaves them unrounded, while a fresh engine rounds them to BF16 first. Weights in 4 bits are
# multiplied in BF16.
SAME_BF16 = 8e-3 if torch.cpu._is_amx_tile_supported() else SAME

CHECKED = {"sync_check_interval": 1}
FP8_CACHE = CHECKED | {"vllm_engine_kwargs": ENGINE | {"kv_cache_dtype": "fp8"}}
BF16, W4A16 = {"rollout_quantization": None}, {"rollout_quantization": "w4a16"}
FILES, COMPRESSOR = (
    CHECKED | {"weight_sync": "checkpoint"},
    CHECKED | {"weight_sync": "llmcompressor"},
)
LORA, VALUES, UNTIED = ["--lora"], ["--lora", "--lora-targets", "v_proj"], ["--untied"]

MIXED = {
    "rollout_quantization": {
        "re:.*down_proj": "w4a16",
        "re:.*layers.0.*o_proj": "none",
        "*": "int8",
    }
}

COLOCATED = {
    "int8": ({}, []),
    "int8, LoRA": ({}, LORA),
    "int8, untied head": ({}, UNTIED),
    "int8, checkpoint per step": (FILES, []),
    "int8, llm-compressor per step": (COMPRESSOR, []),
    "int8, one matrix ignored": (
        {"quantization_ignore": ["lm_head", "re:.*layers.0.*down_proj"]},
        [],
    ),
    "fp8": ({"rollout_quantization": "fp8"}, []),
    "w4a16": (W4A16 | CHECKED, []),
    "w4a16 and int8": (MIXED, []),
    "bf16": (BF16, []),
    "int8, FP8 cache": (FP8_CACHE, []),
    "int8, adapter": (ADAPTER, LORA),
    "w4a16, adapter, rounded": (ADAPTER | W4A16 | {"round_base": True}, LORA),
    "bf16, adapter": (ADAPTER | BF16, LORA + UNTIED),
}
CORNERS = {
    "int8, LoRA, untied head": (CHECKED, LORA + UNTIED),
    "int8, checkpoint per step, LoRA": (FILES, LORA),
    "int8, checkpoint per step, untied head": (FILES, UNTIED),
    "int8, checkpoint per step, LoRA, untied head": (FILES, LORA + UNTIED),
    "int8, llm-compressor per step, LoRA": (COMPRESSOR, LORA),
    "int8, llm-compressor per step, untied head": (COMPRESSOR, UNTIED),
    "int8, llm-compressor per step, LoRA, untied head": (COMPRESSOR, LORA + UNTIED),
    "int8, LoRA on values": ({}, VALUES),
    "w4a16, LoRA on values": (W4A16, VALUES),
    "int8, with the head": (CHECKED | {"quantization_ignore": []}, UNTIED),
    "w4a16, with the head": (CHECKED | W4A16 | {"quantization_ignore": []}, UNTIED),
    "bf16, FP8 cache": (FP8_CACHE | BF16, []),
    "bf16, LoRA": (BF16, LORA),
    "int8, adapter, rounded": (ADAPTER | {"round_base": True}, LORA),
    "w4a16, adapter on values": (ADAPTER | W4A16, VALUES),
    "w4a16 and int8, adapter, rounded": (ADAPTER | MIXED | {"round_base": True}, LORA),
}
"""Each pair of their settings is in a case above."""
ALL = COLOCATED | CORNERS


def marks(case):
    needs = [needs_avx512] if case.startswith("w4a16") or "FP8 cache" in case else []
    return [*needs, pytest.mark.slow] if case in CORNERS else needs


@pytest.fixture(scope="module")
def colocated(request, train, run_scenario, tmp_path_factory):
    """By case: the record of its training, and what an engine started from the checkpoint of the
    same weights says.
    """
    wanted = selected(request, "case")
    chosen = {case: arguments for case, arguments in ALL.items() if (case,) in wanted}
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
    return dict(
        zip(
            chosen,
            zip(records, run_scenario("fresh_engine.py", *engines), strict=True),
            strict=True,
        )
    )


@pytest.mark.xdist_group("colocated")
@pytest.mark.parametrize("case", [pytest.param(case, marks=marks(case)) for case in ALL])
def test_colocated_engine_holds_the_trained_weights(case, colocated):
    (config, arguments), (record, fresh) = ALL[case], colocated[case]
    if "sync_check_interval" in config:
        assert record["is_proven"]
    formats = "w4a16" if "w4a16" in case else config.get("rollout_quantization", "int8")
    tolerance = SAME_BF16 if formats in (None, "w4a16") else SAME
    assert_synced(record, fresh, lora="--lora" in arguments, tolerance=tolerance)
    assert_sends_everything(record)
    assert_metrics(record["history"], formats)


@pytest.fixture
def served(int8_server, tmp_path):
    """Settings of a run with the shared server."""
    rollouts = str(tmp_path / "rollouts")
    return CHECKED | {
        "vllm_mode": "server",
        "vllm_server_base_url": int8_server.url,
        "rollout_checkpoint_dir": rollouts,
    }


@pytest.mark.xdist_group("server")
def test_server_holds_the_trained_weights(served, train, run_scenario, tmp_path):
    runs = {"full": [served], "merged": [served | {"sync_check_interval": 16}, *LORA]}
    records = train(
        *(
            [
                tmp_path / "out",
                "--export",
                tmp_path / name,
                "--config",
                json.dumps(config),
                *arguments,
            ]
            for name, (config, *arguments) in runs.items()
        )
    )
    fresh = run_scenario("fresh_engine.py", *(tmp_path / name for name in runs))
    for is_lora in (False, True):
        assert_synced(records[is_lora], fresh[is_lora], is_lora)
        assert_sends_everything(records[is_lora])
        assert_metrics(records[is_lora]["history"], "int8")
    assert not [*tmp_path.glob("rollouts/trl-qurl-*/[0-9]")], "checkpoints were left"


@pytest.mark.xdist_group("server")
def test_rloo_samples_from_a_server(served, train, tmp_path):
    config = json.dumps(served | {"beta": 0.0, "max_steps": 2})
    [record] = train([tmp_path / "out", "--rloo", "--config", config])
    [rollout] = [row for row in record["history"] if "reward" in row]
    assert 0 < rollout["mismatch/kl_k3"] < 0.01 and rollout["time/sync_check_s"] > 0


@pytest.mark.xdist_group("server")
@pytest.mark.parametrize("arguments", [[], LORA], ids=["full", "LoRA"])
def test_server_loads_llmcompressors_checkpoint_of_each_step(
    arguments, served, train, run_scenario, tmp_path
):
    """llm-compressor writes float32 where the policy is; the server computes in bfloat16. Every
    sync is digested.
    """
    config = json.dumps(served | {"weight_sync": "llmcompressor"})
    [record] = train(
        [tmp_path / "out", "--config", config, "--export", tmp_path / "end", *arguments]
    )
    [fresh] = run_scenario("fresh_engine.py", tmp_path / "end")
    assert_synced(record, fresh, lora=bool(arguments))


@pytest.mark.xdist_group("server")
@pytest.mark.parametrize(
    ("formats", "here"), [("fp8", "fp8"), ({"re:.*down_proj": "w4a16", "*": "int8"}, "w4a16")]
)
def test_server_in_other_formats_is_refused(formats, here, served, train, tmp_path):
    message = (
        rf"first model.layers.0.mlp.down_proj.weight_scale \({here}, shape .* here and int8, shape "
        r".* there\)"
    )
    with pytest.raises(AssertionError, match=message):
        train(
            [tmp_path / "out", "--config", json.dumps(served | {"rollout_quantization": formats})]
        )


@pytest.mark.slow
@needs_avx512
def test_server_of_several_formats(warm_python, train, run_scenario, tmp_path):
    model, scheme = save_tiny(tmp_path / "model"), json.dumps(MIXED["rollout_quantization"])
    with vllm_server(
        model, tmp_path, "--scheme", scheme, python=warm_python, has_worker=True
    ) as server:
        config = CHECKED | MIXED | {"vllm_mode": "server", "vllm_server_base_url": server.url}
        config["rollout_checkpoint_dir"] = str(tmp_path)
        [record] = train(
            [tmp_path / "out", "--config", json.dumps(config), "--export", tmp_path / "full"]
        )
        config["rollout_quantization"] = {"re:.*down_proj": "w4a16", "*": "int8"}
        message = (
            r"first model.layers.0.self_attn.o_proj.weight_scale \(int8, shape .* here and none "
            r"there\)"
        )
        with pytest.raises(AssertionError, match=message):
            train([tmp_path / "out", "--config", json.dumps(config)])
    [fresh] = run_scenario("fresh_engine.py", tmp_path / "full")
    assert_synced(record, fresh, tolerance=SAME_BF16)


@pytest.mark.slow
@pytest.mark.xdist_group("matrix servers")
@pytest.mark.parametrize("head", ["tied", "untied"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_server_of_each_dtype_and_head_holds_the_trained_weights(
    dtype, head, train, warm_python, tmp_path
):
    if dtype == "float32" and torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM's INT8 kernel for CPUs with AMX takes inputs in 16 bits only")
    model = save_tiny(tmp_path / "model", tie_word_embeddings=head == "tied")
    runs = list(itertools.product([[], LORA], ["checkpoint", "llmcompressor"]))
    with vllm_server(
        model, tmp_path, "--scheme", "int8", "--dtype", dtype, python=warm_python
    ) as server:
        config = CHECKED | {"vllm_mode": "server", "vllm_server_base_url": server.url}
        config["rollout_checkpoint_dir"] = str(tmp_path / "rollouts")
        flags = UNTIED if head == "untied" else []
        records = train(
            *(
                [tmp_path, "--config", json.dumps(config | {"weight_sync": way}), *lora, *flags]
                for lora, way in runs
            )
        )
    for (lora, _), record in zip(runs, records, strict=True):
        for row in rollout_rows(record):
            assert row["time/sync_check_s"] > 0
        assert_metrics(record["history"], "int8")
        assert_moved(record, bool(lora))
        assert record["engine_dtype"] == dtype, (
            "layers that are not quantized would be sent in the policy's dtype"
        )
