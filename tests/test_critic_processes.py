"""Either critic, over two processes, takes the steps that it takes in one with the whole batch."""

import pytest


@pytest.fixture(scope="module")
def records(run_scenario):
    return [run_scenario("critics.py", processes=processes) for processes in (1, 2)]


@pytest.mark.parametrize("kind", ["own", "shared"])
@pytest.mark.xdist_group("critic processes")
def test_two_processes_take_the_steps_of_one(kind, records):
    assert [record["processes"] for record in records] == [1, 2]
    one, two = (record[kind] for record in records)
    assert two["same_everywhere"]
    assert two["parameters"] == pytest.approx(one["parameters"], rel=1e-4, abs=1e-6)
    assert two["norm"] == pytest.approx(one["norm"], rel=1e-5)
    norms = [[step["critic/grad_norm"] for step in record["steps"]] for record in (one, two)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3) and all(norm > 0 for norm in norms[0])
    # Linear over ten optimizer steps, whatever the number of processes.
    for record in (one, two):
        rates = [step["critic/learning_rate"] for step in record["steps"]]
        assert rates == pytest.approx([0.1, 0.09, 0.08])
