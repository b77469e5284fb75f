"""Processes that share a server stay in order, whatever fails: they recover together, or raise the
same error.

Every collective of one process is compared with the others' before it runs (`recorder.py`).
"""

import pytest

ENDS = {
    "rollout, fails": {"done"},
    "rollout, fails twice": {"done"},
    "rollout, restarts": {"done"},
    "rollout, is lost": {"ServerLostError"},
    "rollout, talks nonsense": {"done", "KeyError"},  # some answers do not matter
    # vLLM describes itself at a second address
    "start, fails": {"ServerError", "ServerLostError", "done"},
    "long prompt of the main process": {"ValueError"},
    "long prompt of another process": {"ValueError"},
    "a weight that is infinite": {"SyncError"},
    "full disk": {"OSError"},
    "port in use": {"ServerLostError"},
}
"""How each case may end, in all processes alike; others are done."""

WAYS = [("ddp", "checkpoint"), ("fsdp2", "stream"), ("lora", "checkpoint"), ("lora", "adapter")]
FAULTS = ["talks nonsense", "is lost", "restarts", "fails twice"]
FAULTY = [
    *((*way, ["fails", fault]) for way, fault in zip(WAYS, FAULTS, strict=True)),
    *(pytest.param(*way, ["fails", *FAULTS], marks=pytest.mark.slow) for way in WAYS),
]


def check(record):
    outcomes = record["outcomes"]
    wrong = []
    for name, end in outcomes.items():
        kind, _, _ = name.partition(":")
        if end not in ENDS.get(kind, {"done"}):
            wrong.append(f"{name}: {end}")
    assert not wrong, "\n\n".join(wrong)
    return outcomes


@pytest.mark.parametrize(("kind", "route", "faults"), FAULTY)
def test_a_fault_at_each_request(kind, route, faults, run_scenario, tmp_path):
    record = run_scenario("collectives.py", tmp_path, kind, route, *faults, processes=2)
    outcomes = check(record)
    load = "/v1/load_lora_adapter" if route == "adapter" else "load_rollout_weights"
    failed = [name for name in outcomes if name.startswith(("rollout, fails:", "start, fails:"))]
    asked = {name.rpartition(", ")[2] for name in failed}
    always = {"compare_rollout_digests", "rollout_version", "describe_rollouts", "/v1/completions"}
    assert always | {load} <= asked
    assert ("digest_rollout_base" in asked) == (route == "adapter")
    assert ("port in use" in outcomes) == (route == "stream")
    at_start = [outcomes[name] for name in failed if name.startswith("start")]
    assert at_start.count("ServerError") >= 4
    assert record["collectives"] > 300, "what was compared?"


def test_a_run_that_resumes(run_scenario, tmp_path):
    check(run_scenario("collectives.py", tmp_path, "ddp", "checkpoint", "resumed", processes=2))
