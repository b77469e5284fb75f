"""With vLLM's Model Runner V2, which GPUs run by default, on this CPU."""

import json
import sys
from pathlib import Path

import pytest
from conftest import completed
from support.training import assert_moved, assert_synced, rollout_rows

from trl_qurl.lab.runs import read_run

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("runner-v2")]

SCENARIO = Path(__file__).with_name("scenarios") / "on_runner_v2.py"


def run_on_v2(*arguments):
    """The records of the runs, and what a fresh engine says of a checkpoint."""
    # a process that has imported vLLM can't change its mind
    done = completed(sys.executable, SCENARIO, *arguments, VLLM_LOGGING_LEVEL="ERROR")
    lines = [line for line in done.stdout.splitlines() if line.startswith("RECORD ")]
    runs, [fresh] = (json.loads(line.removeprefix("RECORD ")) for line in lines)
    return [*runs, fresh]


def config(**settings):
    return ["--config", json.dumps({"max_steps": 2, "steps_per_generation": 1} | settings)]


STILL = {
    "learning_rate": 0.0,
    "shuffle_dataset": False,
    "smooth_activations": False,
    "seed": 1,
    "repetition_penalty": 1.5,
}
SLEEPS = {"vllm_enable_sleep_mode": True}


def test_an_engine_that_slept_computes_what_a_fresh_one_does_and_each_rollout_has_noise_of_its_own(
    tmp_path,
):
    """V2 allocates its samplers' state with the weights, which sleep discards. It takes each
    request's seed from NumPy's generator, which reward functions may seed.
    """
    trained, plain, reseeded, fresh = run_on_v2(
        tmp_path / "weights",
        *(tmp_path, *config(**SLEEPS), "--export", tmp_path / "weights", "--and"),
        *(tmp_path, *config(**STILL), "--and"),
        *(tmp_path, *config(**STILL, **SLEEPS), "--reseed"),
    )
    assert trained["runner"] == "V2"
    assert read_run(tmp_path).settings["model_runner"] == "V2"
    assert_moved(trained)
    assert_synced(trained, fresh)
    assert all(row["mismatch/kl_k3"] < 1e-3 for row in rollout_rows(trained))
    rewards = [row["reward"] for row in rollout_rows(plain)]
    assert len(set(rewards)) == 2, "each rollout has noise of its own"
    again = [row["reward"] for row in rollout_rows(reseeded)]
    assert again == rewards, "a reward function or sleep has changed the next rollout"
