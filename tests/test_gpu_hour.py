"""`benchmarks/gpu_hour.py` survives parts that fail or hang, resumes, and keeps to its time."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from conftest import completed
from documents import ROOT

pytest.importorskip("matplotlib", reason="needs matplotlib (trl-qurl[plots])")

BENCHMARKS = ROOT / "benchmarks"
STEP = {"way": "bf16", "step_s": 2.0, "generate_s": 0.5, "update_s": 1.25}
FAILED = {"way": "int8", "place": "engine", "batch": 8, "tokens": 4}
FAILED["failure"] = "OSError: no kernel"
HANG = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def gpu_hour(monkeypatch):
    """The script as a module. These parts do not need vLLM."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("gpu_hour")
    monkeypatch.setattr(module, "PACKAGES", ())
    return module


def python(code):
    return ["-c", f"import json, pathlib, sys; {code}"]


def measured(log, cell):
    """A command that writes the record of a benchmark and adds an x to a log."""
    record = json.dumps({"cells": [cell]})
    write = f"pathlib.Path(sys.argv[1], 'record.json').write_text({record!r})"
    return [*python(f"open({str(log)!r}, 'a').write('x'); {write}"), "{folder}"]


def is_running(pid):
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_failures_are_recorded_and_a_second_run_repeats_only_them(gpu_hour, tmp_path, monkeypatch):
    log = tmp_path / "log"
    out = tmp_path / "out"

    def run(*parts):
        plan = [gpu_hour.Part(name, command, 0.1, 1) for name, command in parts]
        plan += [gpu_hour.Part("sync-0.5B", ["-c", HANG], 0.02, 2)]
        plan += [gpu_hour.Part("steps-7B-bf16", [], 0.1, 3, memory_gb=10**6)]
        monkeypatch.setattr(gpu_hour, "make_plan", lambda *_: plan)
        assert gpu_hour.main(["-o", str(out), "--rehearse", "--minutes", "2"]) == 1
        record = json.loads((out / "results.json").read_text())["parts"]
        assert record["sync-0.5B"]["status"] == "failed"
        assert record["steps-7B-bf16"]["status"] == "skipped"
        return record

    steps = ("steps-0.5B-bf16", measured(log, STEP))
    syncs = ("sync-7B-int8", measured(log, FAILED))
    first = run(steps, syncs, ("tests", python("print('2 failed'); sys.exit(3)")))
    assert first["tests"]["reason"] == "2 failed"
    assert first["sync-7B-int8"]["reason"] == "int8: OSError: no kernel"
    assert first["sync-0.5B"]["reason"].startswith("Killed after")
    child = (out / "sync-0.5B" / "log.txt").read_text()
    assert not is_running(int(child)), "a process of the part's group survived"
    second = run(steps, syncs, ("tests", python("print('2 passed')")))
    assert second["tests"]["status"] == second["steps-0.5B-bf16"]["status"] == "ok"
    assert log.read_text() == "xxx", "the step was measured once, and the failed part twice"
    assert second["steps-0.5B-bf16"]["figures"]["cells"] == [STEP]
    assert str(out) not in json.dumps(second), "results that are posted show no private paths"
    assert "| 0.5B | bf16 | 2.00 |" in (out / "results.md").read_text()
    assert (out / "steps.png").exists()


def test_less_important_parts_give_way(gpu_hour):
    first = gpu_hour.Part("first", [], minutes=3, priority=2)
    second = gpu_hour.Part("second", [], minutes=5, priority=3)
    third = gpu_hour.Part("third", [], minutes=4, priority=1)
    fourth = gpu_hour.Part("fourth", [], minutes=2, priority=4)
    parts = [first, second, third, fourth]
    # The third takes 4 of 9 minutes, the first 3 more. The second needs 5, and the fourth fits.
    assert gpu_hour.choose(parts, 9) == [first, third, fourth]
    assert gpu_hour.choose(parts, 14) == parts
    assert gpu_hour.choose(parts, 3) == [first]


@pytest.mark.parametrize("rehearse", [False, True])
def test_the_plan_fits_and_its_options_exist(rehearse, gpu_hour, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    plan = gpu_hour.make_plan(rehearse)
    assert gpu_hour.choose(plan, 40) == plan and len({part.name for part in plan}) == len(plan)
    names = [part.name for part in gpu_hour.choose(plan, 9)]
    assert names == ["reload", "bench-7B", "steps-0.5B-plain-TRL", "steps-0.5B-int8"]
    sources = "".join(path.read_text() for path in BENCHMARKS.glob("*.py"))
    commands = [part.command for part in plan if part.command[0].startswith(str(BENCHMARKS))]
    assert commands
    for word in sum(commands, []):
        assert not word.startswith("--") or word == "--layers" or f'"{word}"' in sources


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_hour_report")


def test_the_pages_show_what_is_stored(report):
    for page, text in report.page_texts(report.stored_records()).items():
        assert report.with_block(page.read_text(), text) == page.read_text()


def test_results_fill_the_pages(report, tmp_path, monkeypatch):
    """Figures of three parts, written by their scripts, on a made-up card."""
    load = {"batch": 256, "completion_len": 512}
    steps = {"none": [{"rollout": 8.0}], "int8": [{"rollout": 4.0}, {"rollout": 5.0}]}
    bench = {"way": "the engine alone", "load": load, "steps": steps, "failures": {"fp8": "no"}}
    trial = {"format": "int8", "name": "train-int8", "status": "ok", "text": "", "advice": ""}
    trial["data"] = {"kernels": ["Cutlass"], "runner": "V2", "distance": 0.0}
    figures = {
        "bench-7B": ("bench", "bench.json", bench),
        "reload": ("reload", "record.json", {"kernels": {}, "trials": [trial]}),
        "steps-0.5B-int8": ("steps", "record.json", {"cells": [STEP]}),
    }
    parts = {}
    for name, (kind, file, content) in figures.items():
        (tmp_path / file).write_text(json.dumps(content))
        parts[name] = {"figures": report.read_figures(kind, tmp_path)}
    record = {"hardware": "NVIDIA X", "date": "2026-11-27", "commit": "abc", "versions": {}}
    record |= {"rehearsal": False, "parts": parts}
    run = tmp_path / "run"
    run.mkdir()
    (run / "results.json").write_text(json.dumps(record))
    pages = {}
    for page, tables in report.PAGES.items():
        copy = tmp_path / page.name
        copy.write_text(page.read_text())
        pages[copy] = tables
    monkeypatch.setattr(report, "PAGES", pages)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    assert report.main([str(run)]) == report.main([str(run)]) == 0
    performance, choosing = (page.read_text() for page in pages)
    assert "**NVIDIA X**, 2026-11-27, commit abc" in performance
    assert "| 7B | 256 | 512 | INT8 | 29,127 | 1.78 |" in performance
    assert "| 0.5B | bf16 | 2.00 |" in performance and "## Where the time goes" in performance
    assert "| int8 | train-int8 | Cutlass | V2 | 0.0e+00 |" in choosing
    assert performance.count("NVIDIA X") == 1, "a second time, it is replaced"
    (run / "results.json").write_text(json.dumps(record | {"rehearsal": True}))
    with pytest.raises(SystemExit, match="2"):
        report.main([str(run)])


def test_a_report_without_results_names_the_missing_file(report, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        report.main([str(tmp_path)])
    assert f"{tmp_path}/results.json does not exist" in capsys.readouterr().err


def test_a_directory_with_other_files_is_refused(gpu_hour, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(SystemExit, match="2"):
        gpu_hour.main(["-o", str(tmp_path), "--rehearse"])
    assert "-o" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.vllm
@pytest.mark.slow
def test_a_rehearsal_runs_every_part(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, BENCHMARKS / "gpu_hour.py", "-o", out, "--rehearse"]
    completed(*command, PYTHONPATH=str(ROOT))
    parts = json.loads((out / "results.json").read_text())["parts"]
    assert {part["status"] for part in parts.values()} == {"ok"}
    assert (out / "steps.png").exists() and (out / "demo" / "demo.png").exists()
