"""The benchmarks run at tiny sizes and fill every cell; a part that fails is recorded."""

import json
import sys

import pytest
import torch
from conftest import completed
from documents import ROOT

from benchmarks.shapes import SHAPES

BENCHMARKS = ROOT / "benchmarks"
TINY = ["--layers", "2", "--hidden", "128", "--vocabulary", "1000", "--device", "cpu"]


@pytest.mark.parametrize(("size", "parameters"), [("0.5B", 494_008_192), ("7B", 7_615_494_656)])
def test_model_sizes_are_those_of_qwen(size, parameters):
    """As Qwen2.5's, but for the norms of queries and keys."""
    model = SHAPES[size].build(torch.bfloat16, torch.device("meta"))
    assert model.num_parameters() == parameters


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "cells", "figure"),
    [
        ("weight_sync --repeats 2 --ways bf16-stream int8-stream int8-checkpoint", 3, "sync_s"),
        ("training_step --tokens 16 --repeats 2 --completions 16 --updates 2", 3, "step_s"),
        ("training_step --tokens 16 --repeats 1 --apart", 3, "step_s"),
        ("rival --completions 8 --tokens 16 --prompt 60 --repeats 1", 3, "later_start_s"),
    ],
)
def test_a_benchmark_with_engines_fills_every_cell(command, cells, figure, tmp_path):
    name, *options = command.split()
    output = tmp_path / "record.json"
    script = BENCHMARKS / f"{name}.py"
    completed(sys.executable, script, *TINY, *options, "--output", output)
    record = json.loads(output.read_text())["cells"]
    assert len(record) == cells
    for cell in record:
        assert cell[figure] > 0
        assert "failure" not in cell
        if name == "weight_sync":
            assert cell["step_sync_s"] > 0, "the step has a sync of its own"
        if name == "training_step":
            parts = [cell.get(f"{part}_s", 0.0) for part in ("sync", "generate", "logps", "update")]
            assert 0 < sum(parts) <= 1.05 * cell["step_s"], "the parts are no more than the step"
