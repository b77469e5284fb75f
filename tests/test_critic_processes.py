"""A critic over two processes takes the steps that it takes in one with the whole batch."""

import pytest


def test_two_processes_take_the_steps_of_one(run_scenario, tmp_path):
    one = run_scenario("critics.py", tmp_path)
    two = run_scenario("critics.py", tmp_path, processes=2)
    assert one["processes"] == 1
    assert two["processes"] == 2
    assert two["kind"] == "DistributedDataParallel"
    assert two["steps"] == pytest.approx(one["steps"], rel=1e-3)
    assert len(set(one["steps"])) == len(one["steps"]), "the critic does not move"
