"""Several trainers in one process: each is freed when it is deleted, and another trainer of TRL is
one of them.
"""

import pytest
from documents import extension_examples

MODULES = ("objective", "config", "trainer", "transform")
"""What docs/architecture.md shows for another objective, another trainer of TRL, and a transform of
weights.
"""

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.xdist_group("several trainers")]

ENGINE = 200e6
"""Bytes; an engine of the scenario holds more, for its key-value cache alone."""


@pytest.fixture(scope="module")
def trainers(run_scenario, tmp_path_factory):
    directory = tmp_path_factory.mktemp("package")
    package = directory / "quantized_gmpo"
    package.mkdir()
    examples = extension_examples()
    for name in MODULES:
        (package / f"{name}.py").write_text(examples[name].lstrip())
    return run_scenario("trainers.py", directory, tmp_path_factory.mktemp("out"))


def test_a_trainer_outlives_the_one_that_it_replaces(trainers):
    assert trainers["run again"] == 2


def test_trainers_and_engines_are_gone_and_memory_does_not_grow(trainers):
    resident = []
    for kind in trainers.keys() - {"run again"}:
        record = trainers[kind]
        assert not record["trainer"] and not record["engine"], f"{kind}: something holds them"
        resident.append(record["resident"])
    assert len(resident) == 4
    assert max(resident) - min(resident) < ENGINE


def test_a_rollout_that_fails_leaves_nothing_for_the_next_one(trainers):
    """With dynamic sampling the next one would be made of its completions, which no reward function
    sees again.
    """
    assert trainers["dynamic sampling"]["scored"] >= 16


def test_another_objective_trains(trainers):
    record = trainers["GRPO"]
    updates = [row for row in record["history"] if "loss" in row]
    assert len(updates) == 2
    assert all("acr/lifted_share" not in row for row in updates)
    assert "rollout_state_0.pt" in record["checkpoint"]


def test_another_trainer_takes_quantized_rollouts(trainers):
    record = trainers["GMPO"]
    assert record["format"] == "int-quantized"
    [rollout] = [row for row in record["history"] if "reward" in row]
    assert 0 < rollout["mismatch/kl_k3"] < 2e-4
    assert rollout["time/sync_s"] > 0
    assert rollout["sync/sent_mb"] > 0
    assert all(row["time/update_s"] > 0 for row in record["history"] if "loss" in row)
    assert "model.safetensors" in record["saved"]
    assert "rollout_state_0.pt" in record["checkpoint"]


def test_a_transform_of_weights_reaches_the_engine_and_the_checkpoint(trainers):
    """A quantized checkpoint is written from the stream that syncs send, so it holds the limited
    weights. An outlier of 1.0 is 20 times as wide as the other rows.
    """
    assert 3 < trainers["GRPO"]["widest"] < 10
