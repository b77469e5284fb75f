"""A critic over two processes takes the steps that it takes in one with the whole batch, and
resumes.
"""

import pytest
import torch
from safetensors.torch import load_file

WAYS = {
    "one process": [],
    "DDP": [],
    "FSDP2": ["fsdp2"],
}

pytestmark = pytest.mark.xdist_group("critic processes")


@pytest.fixture(scope="module")
def runs(run_scenario, tmp_path_factory):
    """By way: record, and the critic that was saved."""
    found = {}
    for way, options in WAYS.items():
        directory = tmp_path_factory.mktemp(way)
        processes = 1 if way == "one process" else 2
        record = run_scenario("critics.py", directory, *options, processes=processes)
        found[way] = (record, load_file(directory / "critic" / "model.safetensors"))
    return found


@pytest.mark.parametrize(
    ("way", "kind", "share"),
    [("DDP", "DistributedDataParallel", 1.0), ("FSDP2", "FSDPQwen2ForTokenClassification", 0.6)],
)
def test_two_processes_take_the_steps_of_one(way, kind, share, runs):
    (one, saved_by_one), (two, saved) = runs["one process"], runs[way]
    assert (one["processes"], two["processes"], two["kind"]) == (1, 2, kind)
    assert two["steps"] == pytest.approx(one["steps"], rel=1e-3)
    assert len(set(one["steps"])) == len(one["steps"]), "the critic does not move"
    torch.testing.assert_close(saved, saved_by_one, rtol=1e-3, atol=1e-5)
    assert two["held"] <= share * one["held"], "nothing was split"


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_critic_takes_the_same_step(way, runs):
    record = runs[way][0]
    assert record["resumed"] == pytest.approx(record["steps"][-1], rel=1e-6)
