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
from support.training import (
    ADAPTER,
    SAME,
    assert_metrics,
    assert_synced,
    metrics_by_step,
)
from transformers import AutoModelForCausalLM

from trl_qurl.quantization import write_checkpoint

CONFIGS = Path(__file__).parents[1] / "examples" / "accelerate_configs"

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
)


# three rollouts of two updates each, every sync checked
CHECKED = {"sync_check_interval": 1, "max_steps": 6}
CUT = {"top_p": 0.9, "temperature": 0.7}
ROUNDED = ADAPTER | {"round_base": True}
ACCUMULATED = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
}
CRITIC = ("critic/value_loss", "critic/grad_norm")
SAVES = {"save_strategy": "steps", "save_steps": 1}
SPLIT = ["colocated", "server", "colocated, adapter", "PPO"]


@pytest.fixture(scope="module")
def runs(train, run_scenario, int8_server, tmp_path_factory):
    """By name: record of a run with two processes, and what a fresh engine says of its last
    weights.
    """
    from tiny import save_tiny  # which takes long to import

    directory = tmp_path_factory.mktemp("runs")
    (directory / "rollouts").mkdir()
    served = {
        "vllm_mode": "server",
        "vllm_server_base_url": int8_server.url,
        "rollout_checkpoint_dir": str(directory / "rollouts"),
    }
    kinds = {
        "colocated": (CUT, ()),
        "server": (served, ("--request-seed", "1")),
        "server, LoRA": (served, ("--lora",)),
        "colocated, adapter": (ROUNDED, ("--lora",)),
        "PPO": (ACCUMULATED, ("--ppo", "--model", save_tiny(directory / "model"))),
    }
    kinds |= {f"{name}, FSDP2": (kinds[name][0], (*kinds[name][1], "--fsdp2")) for name in SPLIT}
    kinds["PPO, FSDP2"] = (ACCUMULATED | SAVES, kinds["PPO, FSDP2"][1])
    runs = {
        name: [directory / f"out {name}", "--export", directory / name, CHECKED | config, *further]
        for name, (config, further) in kinds.items()
    }
    # inside the second rollout
    saved = directory / "out PPO, FSDP2" / "checkpoint-3"
    runs["resumed, FSDP2"] = [*runs["PPO, FSDP2"], "--resume", saved]
    records = dict(zip(runs, train(*runs.values(), processes=2), strict=True))
    fresh = run_scenario("fresh_engine.py", *(directory / name for name in kinds))
    assert not [*(directory / "rollouts").glob("trl-qurl-*/[0-9]")], "rollout checkpoints were left"
    found = dict(zip(kinds, fresh, strict=True))
    return {name: (record, found.get(name)) for name, record in records.items()}


@pytest.mark.vllm
@pytest.mark.xdist_group("server")
@pytest.mark.parametrize(
    "name",
    [
        "colocated",
        "server",
        "server, LoRA",
        "colocated, adapter",
        "PPO",
        *(f"{name}, FSDP2" for name in SPLIT),
    ],
)
def test_two_processes_train_what_the_engine_holds(name, runs):
    record, fresh = runs[name]
    distribution = "FSDP" if "FSDP2" in name else "MULTI_CPU"
    assert (record["processes"], record["distribution"]) == (2, distribution)
    assert record["is_sharded"] == ["FSDP2" in name] * ("server" in name)
    # three rollouts, and one sync before and after
    assert record["weight_version"].endswith("-step6-sync5")
    rollouts = [row for row in record["history"] if "mismatch/kl_k3" in row]
    assert len(rollouts) == 3
    assert all(row["time/sync_check_s"] > 0 for row in rollouts), "a sync was not checked"
    assert_metrics(record["history"], "int8")
    assert_synced(record, fresh, lora="LoRA" in name or "adapter" in name)
    assert record.get("critic_moved", True)
    engines = 1 if "server" in name else 2
    assert record["probes"][:engines] == [pytest.approx(fresh, abs=SAME)] * engines


@pytest.mark.vllm
@pytest.mark.xdist_group("server")
@pytest.mark.parametrize("name", SPLIT)
def test_fsdp2_takes_the_steps_of_ddp(name, runs):
    (ddp, _) = runs[name]
    (fsdp2, _) = runs[f"{name}, FSDP2"]
    assert_same_steps(fsdp2, ddp)
    assert fsdp2["held"] < 0.6 * ddp["held"], "the policy was not split"


def assert_same_steps(found, expected, steps=(1, 2)):
    """What is sampled after the first update depends on the last bits of the weights."""
    found = metrics_by_step(found)
    expected = metrics_by_step(expected)
    for step in steps:
        for metric in ("loss", "grad_norm", "mismatch/ratio_mean", "policy/approx_kl", *CRITIC):
            value = expected[step].get(metric)
            assert found[step].get(metric) == pytest.approx(value, rel=1e-3, abs=1e-5), metric


@pytest.mark.vllm
@pytest.mark.xdist_group("server")
def test_a_run_under_fsdp2_resumes_inside_a_rollout(runs):
    names = ("resumed, FSDP2", "PPO, FSDP2")
    resumed, uninterrupted = (metrics_by_step(runs[name][0]) for name in names)
    assert resumed == uninterrupted


@pytest.mark.vllm
@pytest.mark.xdist_group("server")
def test_fsdp2_saves_whole_policies_beside_the_parts(runs, tmp_path):
    record, _ = runs["PPO, FSDP2"]
    checkpoint = Path(record["output_dir"]) / "checkpoint-6"
    policy = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    write_checkpoint(policy, None, "int8", tmp_path / "quantized")
    found, expected = (
        load_file(directory / "model.safetensors")
        for directory in (tmp_path / "quantized", Path(record["exported"]))
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert (checkpoint / "pytorch_model_fsdp_0").is_dir(), "accelerate's choice was not restored"


@needs_deepspeed
@pytest.mark.vllm
@pytest.mark.xdist_group("server")
def test_zero3_takes_the_steps_of_ddp_and_resumes(runs, run_scenario, tmp_path):
    model = runs["PPO"][0]["model"]
    config = json.dumps(CHECKED | ACCUMULATED | SAVES)
    whole = [tmp_path / "out", "--ppo", "--zero3", "--model", model, "--config", config]
    whole += ["--export", tmp_path / "exported"]
    resumed = [*whole, "--resume", tmp_path / "out" / "checkpoint-3"]
    records = run_scenario("train.py", *whole, "--and", *resumed, processes=2, DS_ACCELERATOR="cpu")
    assert records[0]["distribution"] == "DEEPSPEED"
    assert_same_steps(records[0], runs["PPO"][0])
    assert records[0]["held"] == 0, "the policy was not split"
    assert_metrics(records[0]["history"], "int8")
    [fresh] = run_scenario("fresh_engine.py", tmp_path / "exported")
    assert records[0]["probes"] == [pytest.approx(fresh, abs=SAME)] * 2
    assert metrics_by_step(records[1]) == metrics_by_step(records[0])


@needs_deepspeed
@pytest.mark.vllm
@pytest.mark.xdist_group("server")
def test_the_critics_warmup_does_not_change_the_policys_first_steps_under_zero3(
    runs, run_scenario, tmp_path
):
    """DeepSpeed steps in the warmup, too, without gradients."""
    config = json.dumps(CHECKED | {"critic_warmup_steps": 2})
    run = [tmp_path / "out", "--ppo", "--model", runs["PPO"][0]["model"], "--config", config]
    (ddp,) = run_scenario("train.py", *run, processes=2)
    (zero3,) = run_scenario("train.py", *run, "--zero3", processes=2, DS_ACCELERATOR="cpu")
    assert metrics_by_step(ddp)[2]["loss"] == 0
    assert_same_steps(zero3, ddp, steps=(3, 4))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_the_configs_and_saves_whole_policies(path):
    config = load_config_from_file(str(path))
    assert config.num_processes >= 2
    assert not config.use_cpu, "with use_cpu accelerate starts one process only, and says nothing"
    fsdp = config.fsdp_config or {"fsdp_state_dict_type": "FULL_STATE_DICT"}
    assert fsdp["fsdp_state_dict_type"] == "FULL_STATE_DICT"
    assert config.deepspeed_config.get("zero3_save_16bit_model", True)
