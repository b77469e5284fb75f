"""RLOO on real INT8 rollouts: every sync digested, a run that resumes inside a rollout, adapters,
what is saved.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from support.training import CONFIG, INSIDE_A_ROLLOUT, metrics_by_step

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("resume")]

STEPS = 8
RLOO = {"beta": 0.0, "max_steps": STEPS, "sync_check_interval": 1}

RUNS = {
    "adapter": [
        "--lora",
        "--config",
        json.dumps(RLOO | {"objective": "decoupled", "max_steps": 2}),
    ],
    "16 bits": [
        "--config",
        json.dumps(RLOO | {"objective": "trl", "rollout_quantization": None, "max_steps": 2}),
    ],
}


@pytest.fixture(scope="module")
def runs(train, tmp_path_factory):
    directory = tmp_path_factory.mktemp("rloo")
    whole = ["--config", json.dumps(CONFIG | RLOO)]
    checkpoint = directory / "whole" / f"checkpoint-{INSIDE_A_ROLLOUT}"
    arguments = {"whole": whole, "resumed": ["--resume", checkpoint, *whole], **RUNS}
    records = train(
        *([directory / name, "--rloo", *options] for name, options in arguments.items())
    )
    return directory, dict(zip(arguments, records, strict=True))


def test_it_learns_and_logs_what_grpo_does(runs):
    updates = metrics_by_step(runs[1]["whole"])
    assert updates.keys() == set(range(1, STEPS + 1))
    assert all(
        update["grad_norm"] > 0 and "clip_ratio/region_mean" in update
        for update in updates.values()
    )
    assert max(update["policy/approx_kl"] for update in updates.values()) > 0
    rollouts = [row for row in runs[1]["whole"]["history"] if "reward" in row]
    assert len(rollouts) == STEPS // CONFIG["steps_per_generation"]
    for rollout in rollouts:
        assert 0 < rollout["mismatch/kl_k3"] < 0.1 and rollout["mismatch/ess"] > 0.5
        assert rollout["time/sync_check_s"] > 0, "the digests were not compared"
        assert rollout["sync/sent_mb"] > 0 and rollout["throughput/generated_tokens_per_s"] > 0
    assert all(row["time/update_s"] > 0 for row in runs[1]["whole"]["history"] if "loss" in row)
    assert runs[1]["whole"]["uaq_scale"] == 1.5


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="equality to the last bit is claimed for the CPU only"
)
def test_a_run_that_resumes_inside_a_rollout_is_the_run_that_never_stopped(runs):
    directory, records = runs
    expected, seen = metrics_by_step(records["whole"]), metrics_by_step(records["resumed"])
    for step in range(INSIDE_A_ROLLOUT + 1, STEPS + 1):
        assert seen[step] == expected[step], f"step {step} differs"
    assert len({metrics["loss"] for metrics in expected.values()}) == STEPS
    ends = [
        load_file(directory / name / f"checkpoint-{STEPS}" / "model.safetensors")
        for name in ("whole", "resumed")
    ]
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_the_model_card_names_algorithm_objective_and_paper(runs):
    card = (runs[0] / "whole" / "README.md").read_text()
    assert "The algorithm is RLOO." in card and "The objective is `tis` (Eq. 5 of QuRL)" in card
    assert "eprint       = {2602.13953}" in card and "Elangovan" in card


@pytest.mark.parametrize("name", RUNS)
def test_other_rollouts_and_objectives_train(name, runs):
    steps = [row for row in runs[1][name]["history"] if "grad_norm" in row]
    assert len(steps) == 2 and all(row["grad_norm"] > 0 for row in steps)
    [rollout] = [row for row in runs[1][name]["history"] if "reward" in row]
    assert 0 < rollout["mismatch/kl_k3"] < 0.1
