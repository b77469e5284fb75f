"""After training, engines hold the policy's weights: real TRL, real vLLM, real kernels, in both
modes.
"""

from pathlib import Path

import pytest
import torch
from conftest import needs_avx512, needs_fp8_products, needs_llmcompressor, selected
from support.training import (
    ADAPTER,
    SAME,
    assert_metrics,
    assert_sends_everything,
    assert_synced,
    rollout_rows,
)
from tiny import ENGINE

pytestmark = pytest.mark.vllm

# On CPUs with AMX vLLM keeps the biases of its small BF16 layers in float32. A sync in float32
# leaves them unrounded, while a fresh engine rounds them to BF16 first. Weights in 4 bits are
# multiplied in BF16.
SAME_BF16 = 8e-3 if torch.cpu._is_amx_tile_supported() else SAME

CHECKED = {"sync_check_interval": 1}
FP8_CACHE = CHECKED | {"vllm_engine_kwargs": ENGINE | {"kv_cache_dtype": "fp8"}}
BF16 = {"rollout_quantization": None}
W4A16 = {"rollout_quantization": "w4a16"}
FILES = CHECKED | {"weight_sync": "checkpoint"}
COMPRESSOR = CHECKED | {"weight_sync": "llmcompressor"}
ROUNDED = ADAPTER | {"round_base": True}
MIXED = {
    "rollout_quantization": {
        "re:.*layers.0.*o_proj": "none",
        "re:.*down_proj": "w4a16",
        "*": "int8",
    }
}
RLOO = {"beta": 0.0, "objective": "decoupled"}
LORA = ["--lora"]
UNTIED = ["--untied"]

COLOCATED = {
    "int8": [],
    "int8, LoRA, RLOO": ["--rloo", *LORA, RLOO],
    "int8, untied head": UNTIED,
    "int8, checkpoint per step": [FILES],
    "int8, llm-compressor per step": [COMPRESSOR],
    "int8, one matrix ignored": [{"quantization_ignore": ["lm_head", "re:.*layers.0.*down_proj"]}],
    "fp8": [{"rollout_quantization": "fp8"}],
    "w4a16": [W4A16 | CHECKED],
    "w4a16 and int8": [MIXED],
    "bf16, RLOO": ["--rloo", BF16 | RLOO | {"objective": "trl"}],
    "int8, FP8 cache": [FP8_CACHE],
    "int8, adapter": [ADAPTER, *LORA],
    "w4a16, adapter, rounded": [ROUNDED | W4A16, *LORA],
    "bf16, adapter": [ADAPTER | BF16, *LORA, *UNTIED],
}
CORNERS = {
    "int8, LoRA, untied head": [CHECKED, *LORA, *UNTIED],
    "int8, checkpoint per step, LoRA, untied head": [FILES, *LORA, *UNTIED],
    "int8, llm-compressor per step, LoRA, untied head": [COMPRESSOR, *LORA, *UNTIED],
    "w4a16, LoRA on values": [W4A16, "--lora", "--lora-targets", "v_proj"],
    "int8, with the head": [CHECKED | {"quantization_ignore": []}, *UNTIED],
    "w4a16, with the head": [CHECKED | W4A16 | {"quantization_ignore": []}, *UNTIED],
    "bf16, FP8 cache": [FP8_CACHE | BF16],
    "w4a16 and int8, adapter, rounded": [ROUNDED | MIXED, *LORA],
}
ALL = COLOCATED | CORNERS

SERVED = {
    "int8": [CHECKED],
    "int8, LoRA, RLOO": ["--rloo", *LORA, RLOO],
    "int8, llm-compressor per step": [COMPRESSOR],
    "int8, llm-compressor per step, LoRA": [COMPRESSOR, *LORA],
}
"""With policies in float32 and a server in bfloat16."""


def marks(case):
    found = []
    if case.startswith("w4a16") or "FP8 cache" in case:
        found.append(needs_avx512)
    if case == "fp8":
        found.append(needs_fp8_products)
    if "llm-compressor" in case:
        found.append(needs_llmcompressor)
    if case in CORNERS:
        found.append(pytest.mark.slow)
    return found


def config_of(arguments):
    return next((part for part in arguments if isinstance(part, dict)), {})


@pytest.fixture(scope="module")
def trained(train, run_scenario, tmp_path_factory):
    """Train each case; by case, its record, and what an engine started from the checkpoint of the
    same weights says.
    """

    def run(cases, **common):
        directory = tmp_path_factory.mktemp("trained")
        runs = []
        engines = []
        for number, (case, arguments) in enumerate(cases.items()):
            checkpoint = f"{directory}/checkpoint {number}"
            config = common | config_of(arguments)
            runs.append([directory / "out", "--export", checkpoint, *arguments, config])
            if "FP8 cache" in case:
                checkpoint += "@fp8"
            engines.append(checkpoint)
        records = train(*runs)
        fresh = run_scenario("fresh_engine.py", *engines)
        results = zip(records, fresh, strict=True)
        return dict(zip(cases, results, strict=True))

    return run


def assert_holds(case, arguments, record, fresh):
    """The engine holds the trained weights, and what was logged of its rollouts fits them."""
    config = config_of(arguments)
    if "sync_check_interval" in config:
        assert record["is_proven"]
        for row in rollout_rows(record):
            assert row["time/sync_check_s"] > 0
    formats = "w4a16" if "w4a16" in case else config.get("rollout_quantization", "int8")
    tolerance = SAME_BF16 if formats in (None, "w4a16") else SAME
    assert_synced(record, fresh, lora="--lora" in arguments, tolerance=tolerance)
    assert_sends_everything(record)
    assert_metrics(record["history"], formats)
    has_large_keys = any("keys have biases and no norm" in text for text in record["warned"])
    assert has_large_keys == ("FP8 cache" in case)  # the model is Qwen2's


@pytest.fixture(scope="module")
def colocated(request, trained):
    return trained(selected(request, ALL))


@pytest.mark.xdist_group("colocated")
@pytest.mark.parametrize("case", [pytest.param(case, marks=marks(case)) for case in ALL])
def test_colocated_engine_holds_the_trained_weights(case, colocated):
    assert_holds(case, ALL[case], *colocated[case])


@pytest.fixture(scope="module")
def on_server(int8_server, tmp_path_factory):
    """Settings of a run with the shared server."""
    return {
        "vllm_mode": "server",
        "vllm_server_base_url": int8_server.url,
        "rollout_checkpoint_dir": str(tmp_path_factory.mktemp("rollouts")),
    }


@pytest.fixture(scope="module")
def served(request, trained, on_server):
    return trained(selected(request, SERVED), **on_server)


@pytest.mark.xdist_group("server")
@pytest.mark.parametrize("case", [pytest.param(case, marks=marks(case)) for case in SERVED])
def test_server_holds_the_trained_weights(case, served, on_server):
    assert_holds(case, SERVED[case], *served[case])
    left = Path(on_server["rollout_checkpoint_dir"]).glob("trl-qurl-*/[0-9]")
    assert not [*left], "checkpoints were left"
