"""A critic over two processes takes the steps that it takes in one with the whole batch, and
resumes.
"""

import pytest
import torch
from safetensors.torch import load_file

WAYS = ["DDP", "FSDP2"]


@pytest.fixture(scope="module")
def runs(run_scenario, tmp_path_factory):
    """By way: record, and where the critic was saved."""
    directories = {way: tmp_path_factory.mktemp(way) for way in ("one process", *WAYS)}
    return {
        "one process": (
            run_scenario("critics.py", directories["one process"]),
            directories["one process"],
        ),
        "DDP": (run_scenario("critics.py", directories["DDP"], processes=2), directories["DDP"]),
        "FSDP2": (
            run_scenario("critics.py", directories["FSDP2"], "fsdp2", processes=2),
            directories["FSDP2"],
        ),
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.xdist_group("critic processes")
def test_two_processes_take_the_steps_of_one(way, runs):
    one, two = runs["one process"][0], runs[way][0]
    assert (one["processes"], two["processes"]) == (1, 2)
    norms = one["steps"], two["steps"]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    assert len(set(norms[0])) == len(norms[0]), "the critic does not move"


@pytest.mark.parametrize("way", ["one process", *WAYS])
@pytest.mark.xdist_group("critic processes")
def test_a_resumed_critic_takes_the_same_step(way, runs):
    record = runs[way][0]
    assert record["resumed"] == pytest.approx(record["steps"][-1], rel=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.xdist_group("critic processes")
def test_what_is_saved_is_whole(way, runs):
    one, two = (
        load_file(runs[which][1] / "critic" / "model.safetensors") for which in ("one process", way)
    )
    torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-5)


@pytest.mark.xdist_group("critic processes")
def test_fsdp2_does_split_the_critic(runs):
    whole, part = runs["one process"][0], runs["FSDP2"][0]
    assert part["kind"].startswith("FSDP") and runs["DDP"][0]["kind"] == "DistributedDataParallel"
    assert part["held"] <= 0.6 * whole["held"]
