"""What autocast makes of the weights is what is quantized: engine and trainer have the same policy."""

import json

import pytest
import torch
from conftest import needs_vnni
from tiny import save_tiny

from trl_qurl.quantization.stream import on_grid

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("colocated")]


@pytest.fixture(scope="module")
def runs(train, tmp_path_factory):
    """From weights that bfloat16 holds exactly, as most checkpoints are; each update is far below its spacing."""
    directory = tmp_path_factory.mktemp("autocast")
    save_tiny(directory / "model", family="llama", dtype=torch.bfloat16)
    config = {"learning_rate": 1e-6, "bf16": True, "uaq_scale": 1.0, "model_init_kwargs": {"dtype": "float32"}}
    config |= {"sync_check_interval": 1}
    changes = {
        "autocast": {},
        "none": {"bf16": False},
        "adapter": {},
    }
    policy = [directory / "out", "--model", directory / "model", "--config"]
    given = [[*policy, json.dumps(config | change)] for change in changes.values()]
    given[-1] += ["--lora", "--lora-targets", "all-linear"]
    return dict(zip(changes, train(*given), strict=True))


def test_updates_that_autocast_rounds_away_do_not_reach_the_engine(runs):
    assert runs["autocast"]["on_the_grid_of_bf16"] == 1.0


@needs_vnni
def test_the_probe_rounds_as_the_sync_did(runs):
    probed = [row["sync/probe_ratio"] for row in runs["autocast"]["history"] if "sync/probe_ratio" in row]
    assert probed and max(probed) < 1


@pytest.mark.parametrize("name", ["none", "adapter"])
def test_what_computes_with_float32_weights_is_left_alone(name, runs):
    assert runs[name]["on_the_grid_of_bf16"] < 0.2


def test_only_float32_matrices_are_rounded():
    matrix, bias = torch.tensor([[1.0 + 2.0**-12]]), torch.tensor([1.0 + 2.0**-12])
    assert on_grid(matrix, torch.bfloat16).item() == 1.0 and on_grid(matrix, torch.bfloat16).dtype == torch.float32
    assert on_grid(bias, torch.bfloat16) is bias and on_grid(matrix, None) is matrix
    assert on_grid(matrix.half(), torch.bfloat16).dtype == torch.float16
