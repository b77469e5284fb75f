"""`benchmarks/gpu_hour.py` survives parts that fail or hang, resumes, and keeps to its time."""

import importlib
import json
import sys
import time
from pathlib import Path

import pytest
from conftest import completed
from documents import ROOT

pytest.importorskip("matplotlib", reason="needs matplotlib (trl-qurl[plots])")

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def gpu_hour(monkeypatch):
    """The script as a module. These parts do not need vLLM."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("gpu_hour")
    monkeypatch.setattr(module, "PACKAGES", ())
    return module


def measured(log, **cell):
    """A command that writes the record of a benchmark and adds an x to a log."""
    code = (
        "import json, pathlib, sys; open(sys.argv[2], 'a').write('x');"
        f"pathlib.Path(sys.argv[1], 'record.json').write_text(json.dumps({{'cells': [{cell!r}]}}))"
    )
    return ["-c", code, "{folder}", str(log)]


HANG = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""


def is_running(pid):
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_failures_are_recorded_and_a_second_run_repeats_only_them(
    gpu_hour, tmp_path, monkeypatch, capsys
):
    log, out = tmp_path / "log", tmp_path / "out"
    step = {"way": "bf16", "step_s": 2.0, "generate_s": 0.5, "update_s": 1.25}
    decoded = {
        "way": "int8",
        "place": "trainer",
        "batch": 8,
        "tokens": 4,
        "failure": "OSError: no kernel",
    }
    tests = ["-c", "import sys; print('2 failed'); sys.exit(3)"]
    plan = [
        gpu_hour.Part("doctor", ["-c", "print('No check failed.')"], 0.1, 1),
        gpu_hour.Part("tests", tests, 0.1, 2),
        gpu_hour.Part("decode-7B-int8", measured(log, **decoded | {"place": "engine"}), 0.1, 3),
        gpu_hour.Part("sync-0.5B", ["-c", HANG], 0.02, 4),
        gpu_hour.Part("steps-0.5B-bf16", measured(log, **step), 0.1, 5),
        gpu_hour.Part("steps-7B-bf16", measured(log, **step), 0.1, 6, memory_gb=10**6),
        gpu_hour.Part("demo", ["-c", ""], 50, 7),
    ]
    monkeypatch.setattr(gpu_hour, "make_plan", lambda rehearse: plan)
    command = ["-o", str(out), "--rehearse", "--minutes", "2"]

    started = time.monotonic()
    assert gpu_hour.main(command) == 1
    assert time.monotonic() - started < 60
    parts = json.loads((out / "results.json").read_text())["parts"]
    statuses = ["ok", "failed", "failed", "failed", "ok", "skipped", "skipped"]
    assert [(name, part["status"]) for name, part in parts.items()] == [
        (part.name, status) for part, status in zip(plan, statuses, strict=True)
    ]
    assert (parts["tests"]["exit_status"], parts["tests"]["reason"]) == (3, "2 failed")
    assert parts["decode-7B-int8"]["reason"] == "int8: OSError: no kernel"
    assert parts["sync-0.5B"]["reason"].startswith("Killed after")
    assert not is_running(int((out / "sync-0.5B" / "log.txt").read_text())), (
        "a process of the part's group survived"
    )
    assert parts["steps-0.5B-bf16"]["figures"]["cells"] == [step]
    assert str(tmp_path / "out") not in json.dumps(parts), (
        "results that are posted show no private paths"
    )
    text = (out / "results.md").read_text()
    assert "| 0.5B | bf16 | 2.00 | – | 0.50 | – | 1.25 | 1.00 | – |" in text
    assert "![Training steps](steps.png)" in text and (out / "steps.png").exists()

    tests[1] = "print('2 passed')"
    plan[2:4] = [
        gpu_hour.Part("decode-7B-int8", measured(log, **decoded | {"way": "bf16"}), 0.1, 3)
    ]
    capsys.readouterr()
    assert gpu_hour.main(command) == 1  # the cell fails again
    parts = json.loads((out / "results.json").read_text())["parts"]
    assert [part["status"] for part in parts.values()] == [
        "ok",
        "ok",
        "failed",
        "ok",
        "skipped",
        "skipped",
    ]
    assert parts["tests"]["figures"] == {"summary": "2 passed"}
    assert log.read_text() == "xxx", "the step was measured once, and the failed part twice"
    assert "doctor: done before" in capsys.readouterr().out


def test_less_important_parts_give_way(gpu_hour):
    parts = [gpu_hour.Part(name, [], minutes, priority) for name, minutes, priority in
             [("first", 3, 2), ("second", 5, 3), ("third", 4, 1), ("fourth", 2, 4)]]  # fmt: skip

    def chosen(minutes):
        return [part.name for part in gpu_hour.choose(parts, minutes)]

    # The third part takes 4 of 9 minutes, the first 3 more. The second needs 5, and the fourth fits
    # into the other 2.
    assert chosen(9) == ["first", "third", "fourth"]
    assert chosen(14) == ["first", "second", "third", "fourth"]
    assert chosen(3) == ["first"] and chosen(1) == []


@pytest.mark.parametrize("rehearse", [False, True])
def test_the_plan_fits_and_its_options_exist(rehearse, gpu_hour, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    plan = gpu_hour.make_plan(rehearse)
    assert gpu_hour.choose(plan, 40) == plan
    assert max(part.minutes for part in plan) < 9, (
        "where a command may take ten minutes, no part could run"
    )
    assert len({part.name for part in plan}) == len(plan) == 15
    modules = ("rollouts", "training_step", "weight_sync", "trainers", "shapes")
    sources = "".join((BENCHMARKS / f"{name}.py").read_text() for name in modules)
    commands = [part.command for part in plan if part.command[0].startswith(str(BENCHMARKS))]
    options = {word for command in commands for word in command if word.startswith("--")} - {
        "--layers"
    }
    assert len(commands) == 12 and all(f'"{option}"' in sources for option in options)


def test_a_directory_with_other_files_is_refused(gpu_hour, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(SystemExit, match="2"):
        gpu_hour.main(["-o", str(tmp_path), "--rehearse"])
    assert "-o" in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == [
        "thesis.tex"
    ]


@pytest.mark.vllm
@pytest.mark.slow
def test_a_rehearsal_runs_every_part(tmp_path):
    command = sys.executable, BENCHMARKS / "gpu_hour.py", "-o", tmp_path / "out", "--rehearse"
    completed(*command, PYTHONPATH=str(ROOT))
    record = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {part["status"] for part in record["parts"].values()} == {"ok"} and len(
        record["parts"]
    ) >= 13
    for picture in ("decode.png", "steps.png", "demo/demo.png"):
        assert (tmp_path / "out" / picture).stat().st_size > 10_000
