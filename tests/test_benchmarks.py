"""The benchmarks run at tiny sizes, fill every cell, and report no figures of checkpoints that
differ.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing.spawn
import os
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import completed
from safetensors.torch import save_file

from benchmarks.real_model_design import pooled, runs_needed, spread_interval

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
WAYS = ("stream", "stream, written", "llm-compressor", "llm-compressor, with its copy")
TINY = ["--layers", "2", "--hidden", "128", "--vocabulary", "1000", "--device", "cpu"]


@pytest.fixture
def load(monkeypatch):
    """Import a benchmark as Python does for a script, with its folder on the path."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def run_benchmark(name, *arguments, output, python=sys.executable):
    completed(python, BENCHMARKS / f"{name}.py", *arguments, "--output", output)
    return json.loads(output.read_text())


@pytest.mark.skipif(
    not importlib.util.find_spec("llmcompressor"), reason="needs trl-qurl[llmcompressor]"
)
def test_the_quantizer_benchmark_fills_every_cell(warm_python, tmp_path):
    size = [
        "--layers",
        "2",
        "--hidden",
        "64",
        "--vocabulary",
        "512",
        "--repeats",
        "3",
        "--device",
        "cpu",
    ]
    further = ["--directory", tmp_path / "work", "--dtypes", "float32", "--scheme", "int8"]
    record = run_benchmark(
        "quantizer", *size, *further, output=tmp_path / "results" / "q.json", python=warm_python
    )
    assert {
        "date",
        "commit",
        "hardware",
        "threads",
        "load_average",
        "versions",
        "shape",
    } <= record.keys()
    assert record["versions"]["torch"] == importlib.metadata.version("torch")
    assert record["equal"] is True
    cells = {(cell["dtype"], cell["scheme"], cell["way"]): cell for cell in record["cells"]}
    assert list(cells) == list(product(["float32"], ["int8"], WAYS))
    oneshot = cells["float32", "int8", "llm-compressor"]
    for (_, _, way), cell in cells.items():
        assert len(cell["seconds"]) == 3 and 0 < cell["min_s"] <= cell["median_s"] <= cell["max_s"]
        assert cell["share"] == pytest.approx(cell["median_s"] / oneshot["median_s"])
        # llm-compressor's memory cannot be separated from that of its copy.
        assert (cell["peak_extra_bytes"] is None) == (way == "llm-compressor")
    assert list((tmp_path / "work").glob("trl-qurl-*/[0-9]")) == []


def test_checkpoints_that_differ_are_refused(load, tmp_path):
    last = {"one": 0.0, "same": 0.0, "negative zero": -0.0}
    checkpoints = {name: {"b": torch.tensor([0.0, value])} for name, value in last.items()}
    for name, tensors in (checkpoints | {"other name": {"a": torch.zeros(2)}}).items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    check = load("quantizer").assert_equal_checkpoints
    check(tmp_path / "one", tmp_path / "same")
    with pytest.raises(AssertionError, match="b differs"):
        check(tmp_path / "one", tmp_path / "negative zero")
    with pytest.raises(AssertionError, match=r"other tensors: \['a', 'b'\]"):
        check(tmp_path / "one", tmp_path / "other name")


def test_model_sizes_are_those_of_qwen(load):
    # Qwen3-0.6B, per layer: q 2048 x 1024, k and v 1024 x 1024, o 1024 x 2048, MLP 3 x 3072 x 1024,
    # norms 2 x 1024 and 2 x 128. 28 layers, a tied embedding of 151,936 x 1024, the last norm.
    # Qwen2.5-0.5B: q, o 2 x 896 x 896, k, v 2 x 896 x 128, MLP 3 x 896 x 4864, norms 2 x 896 + 2 x
    # 64. 24 layers, a tied embedding of 151,936 x 896, a norm. 7B: q, o 2 x 3584 x 3584, k, v 2 x
    # 3584 x 512, MLP 3 x 3584 x 18,944, norms 2 x 3584 + 2 x 128. 28 layers, twice 152,064 x 3584,
    # a norm.
    shapes = load("shapes")
    expected = {
        shapes.Shape(): 596_049_920,
        shapes.SHAPES["0.5B"]: 494_008_192,
        shapes.SHAPES["7B"]: 7_615_494_656,
    }
    for shape, parameters in expected.items():
        model = shape.build(torch.bfloat16, torch.device("meta"))
        assert sum(weight.numel() for weight in model.parameters()) == parameters


@pytest.fixture
def warm_spawn(warm_python):
    """Start processes of multiprocessing with the interpreter that has imported everything."""
    before = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(str(warm_python))
    yield
    multiprocessing.set_executable(before)


def divide_by_zero():
    yield {"first": 1}
    yield {"second": 1 / 0}


def test_measurements_before_a_failure_are_kept(warm_spawn, load):
    result = load("apart").measure_apart(divide_by_zero)
    assert result == {"first": 1, "failure": "ZeroDivisionError: division by zero"}


def build_exit(status):
    return lambda answer: answer or os._exit(status)


def test_a_contestant_that_fails_is_an_error_and_not_a_hang(warm_spawn, load):
    broken, dying = (
        load("turns").Contestant(*given) for given in ((int, "no\nengine"), (build_exit, 3))
    )
    try:
        with pytest.raises(RuntimeError, match="^ValueError: invalid literal"):
            broken.ask(1)
        assert dying.ask(7) == 7
        with pytest.raises(RuntimeError, match="the process ended with 3"):
            dying.ask(0)
    finally:
        broken.stop(), dying.stop()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "further", "cells", "figure"),
    [
        (
            "weight_sync",
            ["--repeats", "2", "--ways", "bf16-stream", "int8-stream", "int8-checkpoint"],
            3,
            "sync_s",
        ),
        (
            "training_step",
            ["--tokens", "16", "--repeats", "2", "--completions", "16", "--updates", "2"],
            3,
            "step_s",
        ),
        ("training_step", ["--tokens", "16", "--repeats", "1", "--apart"], 3, "step_s"),
        (
            "rival",
            ["--completions", "8", "--tokens", "16", "--prompt", "60", "--repeats", "1"],
            3,
            "later_start_s",
        ),
        ("adapter_sync", ["--batches", "2", "--tokens", "8", "--repeats", "2"], 2, "bytes"),
        ("memory", ["--growth", "1", "2", "--tokens", "16"], 2 * 5, "peak_bytes"),
    ],
)
def test_a_benchmark_with_engines_fills_every_cell(name, further, cells, figure, tmp_path):
    record = run_benchmark(name, *TINY, *further, output=tmp_path / "record.json")
    assert len(record["cells"]) == cells
    for cell in record["cells"]:
        assert cell[figure] > 0 and "failure" not in cell
        if name == "training_step":
            parts = sum(
                cell.get(f"{part}_s", 0.0) for part in ("sync", "generate", "logps", "update")
            )
            assert 0 < parts <= 1.05 * cell["step_s"], "the parts are no more than the step"


def test_which_updates_a_16_bit_type_sees(load):
    updates, layer = load("half_precision").updates, torch.nn.Linear(4, 4)
    # neighbors: 1 - 2⁻⁸ and 1 + 2⁻⁷ in bfloat16, 1 - 2⁻¹¹ and 1 + 2⁻¹⁰ in float16
    torch.nn.init.ones_(layer.weight)
    assert updates(layer, torch.bfloat16, 2**-10) == {"changed": 0, "seen": 0}
    assert updates(layer, torch.float16, 2**-10) == {"changed": 1, "seen": 1}
    assert updates(layer, torch.float16, 2**-13) == {"changed": 0, "seen": 0}


def test_how_many_runs_a_difference_needs():
    # (1.960 + 0.842)² x (.5 / .5)² + 1.960² / 2 = 7.85 + 1.92 = 9.77; a quarter of the difference:
    # 125.6 + 1.92.
    assert (runs_needed(0.5, 0.5), runs_needed(0.5, 0.5, samples=2), runs_needed(0.5, 0.125)) == (
        10,
        9,
        128,
    )
    # by χ²
    assert spread_interval(1.0, 9) == pytest.approx(
        [(9 / 19.02) ** 0.5, (9 / 2.70) ** 0.5], rel=0.005
    )
    assert pooled([[1, 3], [0, 0, 3], [9]]) == pytest.approx(math.sqrt((1 * 2 + 2 * 3) / 3))
