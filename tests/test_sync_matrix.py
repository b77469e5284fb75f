"""Every combination of mode, transport, dtype of the server, LoRA and tied head trains, with digests at every sync.

tests/reliability.md shows the same matrix as a table. UAQ (s = 1.5) is on wherever there is no adapter. A server takes
a stream over NCCL only on GPUs: that row runs here with both real ends and a stand-in for NCCL between them.
"""

import itertools
import json

import pytest
import torch
from accelerate import Accelerator
from conftest import selected, vllm_server
from peft import LoraConfig, get_peft_model
from test_stream import ends  # noqa: F401
from tiny import rollout_settings, stream_of, tiny_model, tiny_tokenizer
from trl.distributed import DistributedBackend

from trl_qurl.quantization import SCHEMES
from trl_qurl.quantization.uaq import scale_model_
from trl_qurl.rollout.routes import StreamRoute
from trl_qurl.rollout.sync import RolloutCost, WeightSync

CHECKED = {"sync_check_interval": 1, "max_steps": 4}  # two rollouts of two updates
MODELS = list(itertools.product(["full", "LoRA"], ["tied", "untied"]))
IDS = [" ".join(cell) for cell in MODELS]


def cells(*axes, is_corner):
    """All combinations; a corner, each pair of whose values is in another cell, is left to `make test-all`."""
    return [
        pytest.param(*cell, marks=[pytest.mark.slow] if is_corner(*cell) else [], id=" ".join(cell[:1] + cell[1]))
        for cell in itertools.product(*axes)
    ]


COLOCATED = cells(
    ["stream", "checkpoint", "llmcompressor"],
    MODELS,
    is_corner=lambda weight_sync, model: weight_sync == "llmcompressor" and model[1] == "untied",
)
# A server for each dtype and each head, instead of one for each combination of them.
SERVED = cells(
    ["bfloat16", "float32"], MODELS, is_corner=lambda dtype, model: (dtype == "bfloat16") == (model[1] == "untied")
)


def flags(adapter, head):
    return (["--lora"] if adapter == "LoRA" else []) + (["--untied"] if head == "untied" else [])


def assert_trained(record, adapter):
    rollouts = [row for row in record["history"] if "mismatch/kl_k3" in row]
    assert len(rollouts) == 2
    for row in rollouts:
        assert row["time/sync_check_s"] > 0, "a sync was not checked"
        assert row["sync/probe_ratio"] < 1
        assert 0 <= row["mismatch/kl_k3"] < 2e-4
    assert record["probe_end"] != pytest.approx(record["probe_start"], abs=1e-2), "training did not reach the engine"
    assert record["uaq_scale"] == (1.0 if adapter == "LoRA" else 1.5)


@pytest.fixture(scope="module")
def colocated(request, train, tmp_path_factory):
    """The models' records, by transport; each is a chain of its own."""
    found, wanted = {}, selected(request, "weight_sync", "model")

    def records(weight_sync):
        if weight_sync not in found:
            directory = tmp_path_factory.mktemp(weight_sync)
            config = json.dumps(CHECKED | {"weight_sync": weight_sync})
            models = [model for model in MODELS if (weight_sync, model) in wanted]
            runs = train(*([directory, "--config", config, *flags(*model)] for model in models))
            found[weight_sync] = dict(zip(models, runs, strict=True))
        return found[weight_sync]

    return records


@pytest.mark.slow  # each way with a full model and one with an adapter: test_engine.py
@pytest.mark.vllm
@pytest.mark.xdist_group("matrix")
@pytest.mark.parametrize(("weight_sync", "model"), COLOCATED)
def test_colocated(weight_sync, model, colocated):
    assert_trained(colocated(weight_sync)[model], adapter=model[0])


@pytest.fixture(scope="module")
def served(train, warm_python, tmp_path_factory):
    """The records of all runs with servers, by dtype and head of the server, adapter and transport."""
    found = {}

    def records(dtype, head):
        if (dtype, head) in found:
            return found[dtype, head]
        directory = tmp_path_factory.mktemp("served")
        tiny_model(tie_word_embeddings=head == "tied").save_pretrained(directory / "model")
        tiny_tokenizer().save_pretrained(directory / "model")
        arguments = ["--scheme", "int8", "--dtype", dtype]
        with vllm_server(directory / "model", directory, *arguments, python=warm_python) as server:
            cells = list(itertools.product(["full", "LoRA"], ["checkpoint", "llmcompressor"]))
            config = CHECKED | {
                "vllm_mode": "server",
                "vllm_server_base_url": server.url,
                "rollout_checkpoint_dir": str(directory / "rollouts"),
            }
            runs = train(
                *(
                    [directory, "--config", json.dumps(config | {"weight_sync": way}), *flags(adapter, head)]
                    for adapter, way in cells
                )
            )
        found[dtype, head] = dict(zip(cells, runs, strict=True))
        return found[dtype, head]

    return records


@pytest.mark.slow  # a server, and llm-compressor's checkpoint of each step on one: test_engine.py
@pytest.mark.vllm
@pytest.mark.xdist_group("matrix servers")
@pytest.mark.parametrize("weight_sync", ["checkpoint", "llmcompressor"])
@pytest.mark.parametrize(("dtype", "model"), SERVED)
def test_server(dtype, model, weight_sync, served):
    if dtype == "float32" and torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM's INT8 kernel for CPUs with AMX takes inputs in 16 bits only")
    adapter, head = model
    record = served(dtype, head)[adapter, weight_sync]
    assert_trained(record, adapter)
    assert record["engine_dtype"] == dtype, "what is not quantized would travel in the policy's dtype"


@pytest.mark.parametrize("model", MODELS, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_stream_to_a_server(dtype, model, ends):  # noqa: F811
    adapter, head = model
    client, worker = ends
    policy = tiny_model(tie_word_embeddings=head == "tied")
    if adapter == "LoRA":
        policy = get_peft_model(policy, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    else:
        scale_model_(policy, 1.5)
    # Of the engine only the loading is real here: it has no version to ask for, and nothing to probe.
    client.version = lambda: sync.version
    settings = rollout_settings(SCHEMES["int8"], is_served=True, sync_check_interval=1)
    weights, processes = stream_of(policy, SCHEMES["int8"]), DistributedBackend(Accelerator())
    sync = WeightSync(StreamRoute(policy, weights, is_served=True), settings, processes, lambda: 0)
    sync.route.attach(client, str(dtype).removeprefix("torch."))

    sync._check_probe = dict

    sync.push(RolloutCost())
    first = sync.version
    before = {name: tensor.clone() for name, tensor in worker.model.loaded.items()}
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    sync.push(RolloutCost())
    second = sync.version
    assert [version.split("-")[-1] for version in (first, second)] == ["sync1", "sync2"]
    assert ("lm_head.weight" in before) == (head == "untied")
    assert before["model.embed_tokens.weight"].dtype == dtype
    layer = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(before[layer], worker.model.loaded[layer])
