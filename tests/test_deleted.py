"""A deleted trainer gives back its engine, and a trainer that was built since goes on."""

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("deleted")]

ENGINE = 300e6
"""Bytes that an engine of this size holds at the least, of which 1 GiB is promised to its key-value cache."""


@pytest.fixture(scope="module")
def deleted(run_scenario, tmp_path_factory):
    return run_scenario("deleted.py", tmp_path_factory.mktemp("out"))


def test_a_trainer_outlives_the_one_that_it_replaces(deleted):
    assert deleted.pop("run again") == {"steps": 2}


def test_trainers_and_engines_are_gone_and_memory_does_not_grow(deleted):
    deleted.pop("run again", None)
    assert len(deleted) == 3
    for kind, record in deleted.items():
        assert not record["trainer"] and not record["engine"], f"{kind}: something holds them"
    resident = [record["resident"] for record in deleted.values()]
    assert max(resident) - resident[0] < ENGINE, resident
