"""`benchmarks/gpu_hour.py` survives parts that fail or hang, resumes, and keeps to its time."""

import json
import sys
import tarfile
import time

import pytest
import torch
from conftest import completed
from documents import ROOT

pytest.importorskip("matplotlib", reason="needs matplotlib (trl-qurl[plots])")

STEP = {"way": "bf16", "step_s": 2.0, "generate_s": 0.5, "update_s": 1.25}
LOAD = {"tokens": 512}
FAILED = {
    "way": "int8",
    "place": "engine",
    "batch": 8,
    "tokens": 4,
    "failure": "OSError: no kernel",
}


def python(code):
    return ["-c", f"import json, pathlib, sys; {code}"]


def measured(log, cell):
    """A command that writes the record of a benchmark and adds an x to a log."""
    record = json.dumps({"load": LOAD, "cells": [cell]})
    write = f"pathlib.Path(sys.argv[1], 'record.json').write_text({record!r})"
    return [*python(f"open({str(log)!r}, 'a').write('x'); {write}"), "{folder}"]


PARTS = """\
ok steps-0.5B-512-bf16 ()
failed sync-7B-int8 (int8: OSError: no kernel)
failed tests (2 failed)
failed sync-0.5B (Killed after 2 seconds.)
skipped steps-7B-512-bf16 (Needs a GPU with 1000000 GB.)"""


def test_failures_are_recorded_and_a_second_run_repeats_only_them(script, tmp_path, monkeypatch):
    gpu_hour = script("benchmarks", "gpu_hour")
    monkeypatch.setattr(gpu_hour, "PACKAGES", ())  # these parts need none
    log = tmp_path / "log"
    out = tmp_path / "out"

    def run(tests):
        part = gpu_hour.Part
        plan = [
            part("steps-0.5B-512-bf16", measured(log, STEP), 5),
            part("sync-7B-int8", measured(log, FAILED), 5),
            part("tests", python(tests), 5),
            part("sync-0.5B", ["-c", "import time; time.sleep(600)"], 0.1),
            part("steps-7B-512-bf16", [], 5, memory_gb=10**6),
        ]
        monkeypatch.setattr(gpu_hour.Plan, "parts", lambda plan_of: plan)
        command = f"-o {out} --rehearse --minutes 2 --archive {tmp_path}/all.tgz"
        assert gpu_hour.main(command.split()) == 1
        parts = json.loads((out / "results.json").read_text())["parts"]
        lines = []
        for name, part in parts.items():
            lines.append(f"{part['status']} {name} ({part['reason']})")
        return parts, "\n".join(lines)

    assert run("print('2 failed'); sys.exit(3)")[1] == PARTS
    second, said = run("print('2 passed')")
    assert said == PARTS.replace("failed tests (2 failed)", "ok tests ()")
    assert log.read_text() == "xxx", "the step was measured once, and the failed part twice"
    assert second["steps-0.5B-512-bf16"]["figures"]["cells"] == [STEP | LOAD]
    assert str(out) not in json.dumps(second), "results that are posted show no private paths"
    assert "| 0.5B | 512 | bf16 | 2.00 |" in (out / "results.md").read_text()
    assert (out / "steps.png").exists()
    with tarfile.open(tmp_path / "all.tgz") as archive:
        assert {"out/results.md", "out/steps-0.5B-512-bf16/record.json"} < {*archive.getnames()}


def test_the_pages_show_what_is_stored(script):
    report = script("benchmarks", "gpu_hour_report")
    for page, text in report.page_texts(report.stored_records()).items():
        assert report.with_block(page.read_text(), text) == page.read_text()


PAGES = """\
**NVIDIA X**, 2026-11-27, commit abc, :

| model | answers | text | rollouts | tokens per second | min-max | times as fast | host, us a token |
| --- | --- | --- | --- | --- | --- | --- | --- |
| 7B | 64 | yes | bf16 | 8,192 | 8,192-32,768 | 1.00 | 20.0 |
| 7B | 64 | yes | int8 | 16,384 | 8,192-32,768 | 2.00 | 12.2 |

| model | answers | rollouts | decoding step, ms | its kernels, ms | share |
| --- | --- | --- | --- | --- | --- |
| 7B | 64 | int8 | 5.00 | 4.00 | 80% |

| model | tokens | rollouts | step, s | sync | generate | logps | update | speed-up over bf16 | over plain TRL |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| 0.5B | 512 | bf16 | 2.00 | – | 0.50 | – | 1.25 | 1.00 | – |

**NVIDIA X**, 2026-11-27, commit abc, :

| format | trial | kernels | runner | off a new engine, nats | advice |
| --- | --- | --- | --- | --- | --- |
| int8 | train-int8 | Cutlass | V2 | 0.0e+00 |  |

## Steps in turns (trl-qurl bench)

| model | rollouts | step, s | sync | rollout | update | host, us a token |
| --- | --- | --- | --- | --- | --- | --- |
| 0.5B | INT8 | 8.00 | 1.00 | 4.00 | 3.00 | 10.0 |"""


HOST = """{"protocol": {"tokens": 256}, "cells": [
  {"way": "bf16", "answers": 64, "text": true, "rollouts": [], "fastest_s": 0.5, "slowest_s": 2.0,
    "rollout_s": 2.0, "host_s": 0.32768},
  {"way": "int8", "answers": 64, "text": true, "rollouts": [], "fastest_s": 0.5, "slowest_s": 2.0,
    "rollout_s": 1.0, "host_s": 0.2},
  {"way": "int8", "answers": 64, "wall_ms": 5.0, "kernel_ms": 4.0}]}"""
RELOAD = """{"kernels": {}, "trials": [
  {"format": "int8", "name": "train-int8", "status": "ok", "text": "", "advice": "",
    "data": {"kernels": ["Cutlass"], "runner": "V2", "distance": 0.0}}]}"""
BENCH = """{"way": "steps in turns", "load": {"batch": 64, "completion_len": 256},
  "steps": {"int8": [{"step": 8.0, "sync": 1.0, "rollout": 4.0, "host": 0.16384, "update": 3.0}]},
  "failures": {"fp8": "no"}}"""


def test_results_fill_the_pages(script, tmp_path):
    """Figures of some parts, written by their scripts, on a made-up card. 64 x 256 = 16,384 tokens
    in 1 or 2 s; of the latter, 0.32768 s are 20 us a token.
    """
    report = script("benchmarks", "gpu_hour_report")
    steps = json.dumps({"load": LOAD, "cells": [STEP]})
    files = {"host-7B": HOST, "reload": RELOAD, "steps-0.5B-512-int8": steps, "bench-0.5B": BENCH}
    parts = {}
    for name, content in files.items():
        kind, _, _ = name.partition("-")
        file = "bench.json" if kind == "bench" else "record.json"
        (tmp_path / file).write_text(content)
        parts[name] = {"figures": report.read_figures(kind, tmp_path)}
    record = {
        "hardware": "NVIDIA X",
        "date": "2026-11-27",
        "commit": "abc",
        "versions": {},
        "parts": parts,
    }
    texts = [*report.page_texts([record]).values(), report.bench_table(record)]
    assert "\n\n".join(texts) == PAGES


def test_other_bits_are_named(script, monkeypatch):
    """A device that rounds 3 up to 4, and one that hides a NaN."""
    pack = script("benchmarks", "gpu_pack")
    assert pack.differences("int8", torch.bfloat16, "cpu") == []
    scheme = pack.get_scheme("int8")
    exact = type(scheme).quantize

    def wrong(scheme, weight):
        tensors = exact(scheme, weight)
        if weight.shape == (3, 136) and weight.sum() != 0:
            calls.append(weight)
            tensors["weight"][0, 0] += len(calls) % 2
        tensors["weight_scale"] = tensors["weight_scale"].nan_to_num(1.0)
        return tensors

    calls = []
    monkeypatch.setattr(type(scheme), "quantize", wrong)
    named = pack.differences("int8", torch.float32, "cpu")
    assert named[0] == "3 x 136, weight: 1 of 408 bytes differ"
    assert [text.split(":")[0] for text in named[1:]] == ["nan", "inf", "-inf"]


class Core:
    """Stands for an engine's core: a step takes 10 ms by the clock, of which few are an operator's."""

    def __init__(self):
        self.taken = self.profiled = 0

    def get_output(self):
        self.taken += 1
        self.profiled += torch.autograd._profiler_enabled()
        time.sleep(0.01)
        return torch.ones(10).sum().item()


def test_steps_are_timed_and_profiled(script):
    """The clock runs before the profiler starts; what follows both is not counted."""
    host = script("benchmarks", "gpu_host")
    core = Core()
    profiled = host.ProfiledSteps(core, 3)
    with profiled:
        results = {core.get_output() for _ in range(host.WARM_UP + 3 + 3 + 5)}
    assert results == {10.0}
    assert core.taken == host.WARM_UP + 11
    times = profiled.milliseconds()
    assert times["wall_ms"] >= 10
    assert 0 < times["kernel_ms"] < times["wall_ms"] / 2
    assert core.profiled == 3


@pytest.mark.vllm
@pytest.mark.slow
def test_a_rehearsal_runs_every_part(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, ROOT / "benchmarks" / "gpu_hour.py", "-o", out, "--rehearse"]
    completed(*command, PYTHONPATH=ROOT)
    parts = json.loads((out / "results.json").read_text())["parts"]
    assert {part["status"] for part in parts.values()} == {"ok"}
    assert (out / "steps.png").exists()
    assert (out / "demo" / "demo.png").exists()
