"""A server of each dtype and with each head trains with every adapter and transport, with digests at every sync.

tests/reliability.md shows the same matrix as a table. UAQ (s = 1.5) is on wherever there is no adapter. Colocated
engines are in test_engine.py, streams to a server in test_stream.py.
"""

import itertools
import json

import pytest
import torch
from conftest import vllm_server
from support.training import assert_moved, rollout_rows
from tiny import save_tiny, tiny_model

RUNS = list(itertools.product(["full", "LoRA"], ["checkpoint", "llmcompressor"]))


@pytest.fixture(scope="module")
def served(train, warm_python, tmp_path_factory):
    """The records of all runs with a server, by adapter and transport."""
    servers = {}

    def records(dtype, head):
        if (dtype, head) in servers:
            return servers[dtype, head]
        directory = tmp_path_factory.mktemp("served")
        save_tiny(directory / "model", tiny_model(tie_word_embeddings=head == "tied"))
        arguments = ["--scheme", "int8", "--dtype", dtype]
        with vllm_server(directory / "model", directory, *arguments, python=warm_python) as server:
            config = {
                "sync_check_interval": 1,
                "max_steps": 4,  # two rollouts of two updates
                "vllm_mode": "server",
                "vllm_server_base_url": server.url,
                "rollout_checkpoint_dir": str(directory / "rollouts"),
            }
            flags = {"full": [], "LoRA": ["--lora"], "tied": [], "untied": ["--untied"]}
            runs = train(
                *(
                    [directory, "--config", json.dumps(config | {"weight_sync": way}), *flags[adapter], *flags[head]]
                    for adapter, way in RUNS
                )
            )
        servers[dtype, head] = dict(zip(RUNS, runs, strict=True))
        return servers[dtype, head]

    return records


@pytest.mark.slow  # test_engine.py has a server with each transport
@pytest.mark.vllm
@pytest.mark.xdist_group("matrix servers")
@pytest.mark.parametrize("weight_sync", ["checkpoint", "llmcompressor"])
@pytest.mark.parametrize("adapter", ["full", "LoRA"])
@pytest.mark.parametrize("head", ["tied", "untied"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_server(dtype, head, adapter, weight_sync, served):
    if dtype == "float32" and torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM's INT8 kernel for CPUs with AMX takes inputs in 16 bits only")
    record = served(dtype, head)[adapter, weight_sync]
    rows = rollout_rows(record)
    assert len(rows) == 2
    for row in rows:
        assert row["time/sync_check_s"] > 0, "a sync was not checked"
        assert row["sync/probe_ratio"] < 1
        assert 0 <= row["mismatch/kl_k3"] < 2e-4
    assert_moved(record, adapter == "LoRA")
    assert record["engine_dtype"] == dtype, "layers that are not quantized would be sent in the policy's dtype"
