"""The benchmarks run at tiny sizes, report every cell, and cannot report figures of results that differ."""

import importlib.metadata
import importlib.util
import json
import multiprocessing.spawn
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import child_environment
from safetensors.torch import save_file

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

WAYS = ("stream", "stream, written", "llm-compressor", "llm-compressor, with its copy")

needs_llmcompressor = pytest.mark.skipif(
    importlib.util.find_spec("llmcompressor") is None, reason="needs llm-compressor (trl-qurl[llmcompressor])"
)


@pytest.fixture
def quantizer(monkeypatch):
    """The benchmark as a module; scripts find their neighbors because Python puts their folder on the path."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("quantizer")


@needs_llmcompressor
@pytest.mark.parametrize(
    ("dtypes", "schemes"),
    [
        (["float32"], ["int8"]),
        pytest.param(["float32", "bfloat16"], ["int8", "fp8"], marks=pytest.mark.slow),
    ],
    ids=["one case", "all cases"],
)
def test_quantizer_benchmark_fills_every_cell(dtypes, schemes, warm_python, tmp_path):
    output = tmp_path / "results" / "quantizer.json"
    size = ["--layers", "2", "--hidden", "64", "--vocabulary", "512", "--repeats", "3", "--device", "cpu"]
    command = [
        warm_python,
        BENCHMARKS / "quantizer.py",
        *size,
        "--output",
        output,
        "--directory",
        tmp_path / "work",
    ]
    command += ["--dtypes", *dtypes, "--schemes", *schemes]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]

    record = json.loads(output.read_text())
    assert {"date", "commit", "hardware", "threads", "load_average", "versions", "shape"} <= record.keys()
    assert record["versions"]["torch"] == importlib.metadata.version("torch")
    assert record["equal"] is True
    assert "Checkpoints equal bit for bit, all tensors: yes" in done.stdout

    cells = {(cell["dtype"], cell["scheme"], cell["way"]): cell for cell in record["cells"]}
    assert list(cells) == list(product(dtypes, schemes, WAYS))
    lines = done.stdout.splitlines()
    for (dtype, scheme, way), cell in cells.items():
        assert len(cell["seconds"]) == 3
        assert 0 < cell["min_s"] <= cell["median_s"] <= cell["max_s"]
        assert cell["share"] == pytest.approx(cell["median_s"] / cells[dtype, scheme, "llm-compressor"]["median_s"])
        # llm-compressor's memory cannot be told apart from that of its copy.
        assert (cell["peak_extra_bytes"] is None) == (way == "llm-compressor")
        row = f"{dtype} {scheme} {way} {cell['median_s']:.3f} {cell['min_s']:.3f}-{cell['max_s']:.3f}"
        assert any(" ".join(line.split()).startswith(row) for line in lines), row
    for dtype, scheme in product(dtypes, schemes):
        copied = zip(cells[dtype, scheme, WAYS[3]]["seconds"], cells[dtype, scheme, WAYS[2]]["seconds"], strict=True)
        assert all(with_copy > without for with_copy, without in copied)
    assert list((tmp_path / "work").glob("trl-qurl-*/[0-9]")) == []


def test_checkpoints_that_differ_in_one_bit_are_told_apart(quantizer, tmp_path):
    tensors = {"a": torch.zeros(4, 4, dtype=torch.int8), "b": torch.zeros(4)}
    for name, value in {"one": 0.0, "same": 0.0, "negative zero": -0.0}.items():
        (tmp_path / name).mkdir()
        save_file(tensors | {"b": torch.tensor([0.0, 0.0, 0.0, value])}, tmp_path / name / "model.safetensors")
    quantizer.assert_equal_checkpoints(tmp_path / "one", tmp_path / "same")
    with pytest.raises(AssertionError, match="b differs"):
        quantizer.assert_equal_checkpoints(tmp_path / "one", tmp_path / "negative zero")


def test_checkpoints_with_other_tensors_are_told_apart(quantizer, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_file({name: torch.zeros(2)}, tmp_path / name / "model.safetensors")
    with pytest.raises(AssertionError, match=r"other tensors: \['a', 'b'\]"):
        quantizer.assert_equal_checkpoints(tmp_path / "a", tmp_path / "b")


PEAK = """
import torch
from quantizer import peak_bytes, reset_peak

cpu = torch.device("cpu")
reset_peak(cpu)
before = peak_bytes(cpu)
torch.ones(16 * 2**20)  # 64 MiB, freed at once
print(peak_bytes(cpu) - before)
reset_peak(cpu)
print(peak_bytes(cpu) - before)
"""


def test_peak_memory_outlives_what_was_freed(warm_python):
    """In a new process: the commands that other tests call in this one keep what is freed."""
    command = [warm_python, "-c", PEAK]
    environment = child_environment(PYTHONPATH=f"{BENCHMARKS}{os.pathsep}{BENCHMARKS.parent}")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    while_it_was, afterwards = map(int, done.stdout.split())
    assert while_it_was == pytest.approx(64 * 2**20, rel=0.1)
    assert afterwards < 16 * 2**20


def test_shape_is_that_of_qwen3_0_6b(quantizer):
    # Per layer q (2048 x 1024), k and v (1024 x 1024), o (1024 x 2048), gate, up, down (3 x 3072 x 1024), norms of the
    # hidden size (2 x 1024) and of the heads (2 x 128): 15,730,944. 28 of them, the embedding of 151,936 x 1024, which
    # is also the head, and the last norm (1024): 596,049,920.
    model = quantizer.Shape().build(torch.float32, torch.device("meta"))
    assert sum(weight.numel() for weight in model.parameters()) == 596_049_920


def test_largest_layer_by_hand(quantizer):
    # 3072 x 1024 weights: in float32 4 + 4 bytes of weight and quotient and 1 of code, in bfloat16 2 + 2 + 1.
    weights = 3072 * 1024
    assert quantizer.largest_layer_bytes(quantizer.Shape()) == {"float32": 9 * weights, "bfloat16": 5 * weights}


TINY = ["--layers", "2", "--hidden", "128", "--vocabulary", "1000"]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "further", "figure"),
    [
        (
            "weight_sync",
            ["--repeats", "2", "--ways", "bf16-stream", "int8-stream", "fp8-stream", "int8-checkpoint"],
            "sync_s",
        ),
        ("ppo_memory", [], "peak_bytes"),
    ],
)
def test_a_benchmark_with_engines_fills_every_cell(name, further, figure, tmp_path):
    output = tmp_path / "record.json"
    command = [sys.executable, BENCHMARKS / f"{name}.py", *TINY, *further, "--device", "cpu", "--output", output]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    record = json.loads(output.read_text())
    cells = record["cells"] if isinstance(record["cells"], list) else list(record["cells"].values())
    assert len(cells) == (3 if name == "ppo_memory" else 4)
    assert all(cell[figure] > 0 and "failure" not in cell for cell in cells)


@pytest.fixture
def warm_spawn(warm_python):
    """New processes of multiprocessing's import nothing that takes long."""
    before = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(str(warm_python))
    yield
    multiprocessing.set_executable(before)


def divide_by_zero():
    yield {"first": 1}
    yield {"second": 1 / 0}


def test_what_was_measured_before_a_fault_is_kept(warm_spawn, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    result = importlib.import_module("apart").measure_apart(divide_by_zero)
    assert result == {"first": 1, "failure": "ZeroDivisionError: division by zero"}


def build_adder(first):
    def add(second):
        if second == "die":
            import os

            os._exit(3)
        return first + second

    return add


def build_nothing():
    raise ValueError("no\nengine")


def test_contestants_are_asked_one_by_one_and_fail_alone(warm_spawn, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    contestant = importlib.import_module("turns").Contestant
    one, other, broken = contestant(build_adder, 1), contestant(build_adder, 10), contestant(build_nothing)
    try:
        assert [one.ask(2), other.ask(2), one.ask(3)] == [3, 12, 4]
        for _ in range(2):
            with pytest.raises(RuntimeError, match="^ValueError: no engine$"):
                broken.ask(1)
        with pytest.raises(RuntimeError, match="TypeError: unsupported operand"):
            one.ask("2")
        with pytest.raises(RuntimeError, match="the process ended with 3"):
            one.ask("die")
        assert other.ask(1) == 11
    finally:
        for each in (one, other, broken):
            each.stop()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "further", "cells"),
    [
        ("rollouts", ["--batches", "1", "4", "--tokens", "8", "--repeats", "2"], 2 * 2 * 2),
        ("training_step", ["--tokens", "16", "--repeats", "2", "--completions", "16", "--updates", "2"], 3),
        ("training_step", ["--tokens", "16", "--repeats", "1", "--apart"], 3),
    ],
)
def test_a_benchmark_in_turns_fills_every_cell(name, further, cells, tmp_path):
    record = run_benchmark(name, *further, output=tmp_path / "record.json")
    assert len(record["cells"]) == cells
    for cell in record["cells"]:
        assert "failure" not in cell
        if name == "rollouts":
            assert len(cell["seconds"]) == 2 and cell["tokens_per_s"] > 0
        else:
            parts = sum(cell.get(f"{part}_s", 0.0) for part in ("sync", "generate", "logps", "update"))
            assert ("sync_s" in cell) == (cell["way"] != "passes")
            assert 0 < parts <= 1.05 * cell["step_s"], "the parts are no more than the step"


@pytest.mark.vllm
@pytest.mark.slow
def test_an_adapter_s_sync_stands_beside_a_merged_one(tmp_path):
    further = ["--batches", "2", "--tokens", "8", "--repeats", "2"]
    record = run_benchmark("adapter_sync", *further, output=tmp_path / "record.json")
    merged, adapter = record["cells"]
    assert (merged["way"], adapter["way"]) == ("merged", "adapter")
    assert 0 < adapter["bytes"] < merged["bytes"] and len(adapter["seconds"]) == len(merged["seconds"]) == 2
    assert [cell["way"] for cell in record["rollouts"]] == ["merged", "adapter"]
    assert all(cell["tokens_per_s"] > 0 for cell in record["rollouts"])


@pytest.mark.vllm
@pytest.mark.slow
def test_predictions_stand_beside_measured_steps(tmp_path):
    record = run_benchmark("predictions", "--settings", "1", "--repeats", "2", output=tmp_path / "record.json")
    [setting] = record["settings"]
    for way in ("bf16", "int8"):
        assert setting[way]["predicted_s"] > 0 and setting[way]["measured_s"] > 0
    low, middle, high = setting["predicted_speedup"]
    assert low <= middle <= high


def test_time_to_target_adds_up_what_a_run_logged(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("time_to_target")
    seconds = {"time/sync_s": 1.0, "time/generate_s": 2.0, "time/logps_s": 3.0, "time/update_s": 4.0}
    rows = [{"expected_accuracy": 0.1 * number, **seconds} for number in range(1, 9)]
    assert module.seconds_of(rows[0]) == 1 + 2 + 3 + 4 * 4  # four updates per rollout, of which the mean is logged
    # The mean of the accuracies 0.2 to 0.6 is 0.4.
    assert module.reached(rows, target=0.39) == {"rollouts": 6, "seconds": pytest.approx(6 * 22)}
    assert module.reached(rows, target=0.1) == {"rollouts": 5, "seconds": pytest.approx(5 * 22)}
    assert module.reached(rows, target=0.7) == {"rollouts": None, "seconds": None}


@pytest.mark.vllm
@pytest.mark.slow
def test_memory_is_measured_at_every_size(tmp_path):
    record = run_benchmark("memory", "--growth", "1", "2", "--tokens", "16", output=tmp_path / "record.json")
    assert len(record["cells"]) == 2 * 5
    for cell in record["cells"]:
        assert "failure" not in cell
        assert cell["peak_bytes"] > cell["parameters_bytes"] > 0 and cell["sync_bytes"] >= 0
    doubled = {cell["setting"]: cell["parameters_bytes"] for cell in record["cells"]}
    assert doubled["layers x 2"] > doubled["base"] == doubled["tokens x 2"]


@pytest.mark.vllm
@pytest.mark.slow
def test_kept_memory_is_measured_beside_returned_memory(tmp_path):
    record = run_benchmark("allocator", "--tokens", "16", "--repeats", "1", output=tmp_path / "record.json")
    cells = {cell["memory"]: cell for cell in record["cells"]}
    assert set(cells) == {"returned", "kept"}
    for cell in cells.values():
        assert cell["step_s"] > 0 and cell["page_faults"] >= 0 and cell["peak_bytes"] > 0


@pytest.mark.vllm
@pytest.mark.slow
def test_time_to_target_trains_in_every_format(tmp_path):
    output = tmp_path / "record.json"
    command = [sys.executable, BENCHMARKS / "time_to_target.py", "--seeds", "0", "--rollouts", "6", "--target", "0.1"]
    command += ["--output", output]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    cells = json.loads(output.read_text())["cells"]
    assert [(cell["format"], cell["rollouts"]) for cell in cells] == [("bf16", 5), ("int8", 5)]
    assert all(0 < cell["generate_s"] < cell["step_s"] < cell["seconds"] for cell in cells)


def test_time_to_target_reads_the_study_s_runs(tmp_path):
    output = tmp_path / "record.json"
    logs = [BENCHMARKS / "objectives" / "runs" / "main" / f"bf16-seed{seed}.jsonl.gz" for seed in (0, 1)]
    command = [sys.executable, BENCHMARKS / "time_to_target.py", "--logs", *logs, "--output", output]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    cells = json.loads(output.read_text())["cells"]
    assert [(cell["format"], cell["seed"]) for cell in cells] == [("bf16", 0), ("bf16", 1)]
    assert all(5 <= cell["rollouts"] < 120 for cell in cells)


def run_benchmark(name, *further, output):
    command = [sys.executable, BENCHMARKS / f"{name}.py", *TINY, *further, "--device", "cpu", "--output", output]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(output.read_text())
