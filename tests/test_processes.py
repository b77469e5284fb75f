"""Several processes: what each engine holds afterwards is what was trained, however the weights
were spread.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file
from support.training import ADAPTER, MOVED, SAME, assert_metrics, assert_synced

CONFIGS = Path(__file__).parents[1] / "examples" / "accelerate_configs"

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
)


# three rollouts of two updates each, every sync checked
CHECKED = {"sync_check_interval": 1, "max_steps": 6}


@pytest.fixture(scope="module")
def runs(train, run_scenario, int8_server, tmp_path_factory):
    """By name: record of a run with two processes, and what a fresh engine says of its last
    weights.
    """
    directory = tmp_path_factory.mktemp("runs")
    (directory / "rollouts").mkdir()
    served = {
        "vllm_mode": "server",
        "vllm_server_base_url": int8_server.url,
        "rollout_checkpoint_dir": str(directory / "rollouts"),
    }

    def arguments(name, config, *further):
        return [
            directory / "out",
            "--export",
            directory / name,
            "--config",
            json.dumps(CHECKED | config),
            *further,
        ]

    records = train(
        arguments("colocated", {}),
        arguments("server", served),
        arguments("server, LoRA", served, "--lora"),
        arguments("colocated, adapter", ADAPTER | {"round_base": True}, "--lora"),
        processes=2,
    )
    names = ["colocated", "server", "server, LoRA", "colocated, adapter"]
    fresh = run_scenario("fresh_engine.py", *(directory / name for name in names))
    assert not [*(directory / "rollouts").glob("trl-qurl-*/[0-9]")], "rollout checkpoints were left"
    return dict(zip(names, zip(records, fresh, strict=True), strict=True))


@pytest.mark.vllm
@pytest.mark.xdist_group("server")
@pytest.mark.parametrize("name", ["colocated", "server", "server, LoRA", "colocated, adapter"])
def test_two_processes_train_what_the_engine_holds(name, runs):
    record, fresh = runs[name]
    assert (record["processes"], record["distribution"]) == (2, "MULTI_CPU")
    # three rollouts, and one sync before and after
    assert record["weight_version"].endswith("-step6-sync5")
    rollouts = [row for row in record["history"] if "mismatch/kl_k3" in row]
    assert len(rollouts) == 3
    assert all(row["time/sync_check_s"] > 0 for row in rollouts), "a sync was not checked"
    assert_metrics(record["history"], "int8")
    assert_synced(record, fresh, lora="LoRA" in name or "adapter" in name)
    engines = 2 if "colocated" in name else 1
    assert record["probes"][:engines] == [pytest.approx(fresh, abs=SAME)] * engines


@pytest.mark.vllm
@pytest.mark.xdist_group("server")
def test_a_server_and_a_colocated_engine_agree(runs):
    start = {name: record["probe_start"] for name, (record, _) in runs.items()}
    assert start["server"] == pytest.approx(start["colocated"], abs=SAME)
    assert start["server, LoRA"] != pytest.approx(start["server"], abs=MOVED), (
        "a random adapter changes the model"
    )


@pytest.mark.vllm
@pytest.mark.xdist_group("server")
@pytest.mark.parametrize("way", ["fsdp2", pytest.param("zero3", marks=needs_deepspeed)])
def test_weights_held_in_parts_arrive_whole(way, run_scenario, int8_server, tmp_path):
    modes = {
        "colocate": {},
        "server": {"vllm_mode": "server", "vllm_server_base_url": int8_server.url},
    }
    arguments = []
    for mode, config in modes.items():
        arguments += [
            tmp_path / "out",
            way,
            "--export",
            tmp_path / mode,
            "--config",
            json.dumps(config),
            "--and",
        ]
    records = run_scenario("sharded.py", *arguments[:-1], processes=2, DS_ACCELERATOR="cpu")
    fresh = run_scenario("fresh_engine.py", *(tmp_path / mode for mode in modes))
    for mode, record, expected in zip(modes, records, fresh, strict=True):
        assert record["processes"] == 2
        assert record["held_share"] <= 0.5, "the model was not split"
        # A server is asked by the main process alone.
        engines = record["after"] if mode == "colocate" else record["after"][:1]
        assert engines == [pytest.approx(expected, abs=SAME)] * len(engines)
        assert record["before"][0] != pytest.approx(expected, abs=MOVED), (
            "the update did not move the probe"
        )
        assert record["probed"] or way == "zero3"
        saved, whole = (
            load_file(tmp_path / name / "model.safetensors") for name in (f"{mode}-saved", mode)
        )
        torch.testing.assert_close(saved, whole, rtol=0, atol=0)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_the_configs(path):
    config = load_config_from_file(str(path))
    assert config.num_processes >= 2
    assert not config.use_cpu, "with use_cpu accelerate starts one process only, and says nothing"
