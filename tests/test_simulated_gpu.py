"""What vLLM's Python code does on GPUs that are not there (`simulated_gpu`), and whether a reload
leaves it right.
"""

import gc
import json
import re
from dataclasses import replace

import pytest
import torch
import vllm
from documents import ROOT
from simulated_gpu import table
from simulated_gpu.cases import ALWAYS, CORNERS, FAULTS, ON_THE_PAGE
from simulated_gpu.forking import simulate_all
from simulated_gpu.platform import GPUS
from torch import nn

from trl_qurl.quantization import SCHEMES
from trl_qurl.rollout.repairs import cache_scales, moved_tensors

only_here = pytest.mark.skipif(
    not vllm.__version__.startswith("0.32."), reason="the doubles imitate vLLM 0.32"
)


def on_a_simulated_gpu(test):
    return only_here(pytest.mark.simulated_gpu(pytest.mark.xdist_group("simulated gpu")(test)))


def marks_of(case):
    return [] if case in ALWAYS else pytest.mark.slow


SIMULATED = []
for case in dict.fromkeys([*ALWAYS, *ON_THE_PAGE, *CORNERS]):
    SIMULATED.append(pytest.param(case, marks=marks_of(case)))
UNREPAIRED = []
for case, fault in FAULTS.items():
    broken = replace(case, is_repaired=False)
    UNREPAIRED.append(pytest.param(broken, *fault, marks=marks_of(case)))


@pytest.fixture(scope="module")
def reports(request):
    """The reports of all cases that the tests of this run ask for; those on one GPU share its
    imports.
    """
    cases = {}
    for item in request.session.items:
        if "case" in item.fixturenames and item.path == request.path:
            cases[item.callspec.params["case"]] = None
    return dict(simulate_all(cases))


@on_a_simulated_gpu
@pytest.mark.parametrize("case", SIMULATED, ids=str)
def test_a_reload_leaves_what_a_fresh_start_would(case, reports):
    report = reports[case]
    if not all(scheme.runs_on(GPUS[case.gpu]) for scheme in case.schemes):
        assert list(report.faults) == ["refused"] and not report.kernels, "an engine started"
    else:
        assert not report.faults
        assert report.kernels == report.kernels | ALWAYS.get(case, {})
        assert len(set(report.kernels.values())) >= len(case.schemes), (
            "layers of two formats have one kernel"
        )


@on_a_simulated_gpu
@pytest.mark.parametrize(("case", "kind", "part"), UNREPAIRED, ids=str)
def test_vllms_own_reload_needs_the_repair(case, kind, part, reports):
    assert part in str(reports[case].faults.get(kind)), (
        "vLLM has repaired it: remove our repair and the report"
    )


@pytest.mark.slow
@on_a_simulated_gpu
def test_the_page_says_what_was_simulated(reports):
    found = reports if set(ON_THE_PAGE) <= set(reports) else dict(simulate_all(ON_THE_PAGE))
    assert table.read() == table.rows(found), "write it: make simulated"


def test_formats_that_a_gpu_ran_are_in_its_stored_log():
    """The H200's; the H100 was stopped by a missing package in between."""
    [path] = (ROOT / "benchmarks" / "results").glob("first_gpu-*-h200.jsonl")
    steps = map(json.loads, path.read_text().splitlines())
    ran = {step["step"].removeprefix("reload-") for step in steps if step.get("ok")}
    assert ran & set(SCHEMES) == table.RAN["Hopper (H100, H200)"]


# What no case above has: scratch that a reload drops, a shape that changes, scales of a cache
# --------------------------------------------------------------------------------------------------


class Kernel:
    __module__ = "vllm.model_executor.made_up"

    def __init__(self):
        self.packed = torch.zeros(4)


def test_the_repair_keeps_what_graphs_write_into_once():
    layer = nn.Module()
    layer.scheme = Kernel()
    first = layer.scheme.packed.data_ptr()
    for _ in range(3):
        with moved_tensors.around_reload(layer):
            layer.scheme = Kernel()
            del layer.scheme.packed  # until the next forward pass
        layer.scheme.packed = torch.zeros(4)
    gc.collect()
    [kept] = layer._kept_for_graphs.values()
    assert kept.data_ptr() == first


def test_the_repair_brings_tensors_back():
    layer = nn.Linear(4, 1)
    layer.scheme = Kernel()
    held = [layer.weight, layer.bias, layer.scheme.packed]
    places = [tensor.data_ptr() for tensor in held]
    with moved_tensors.around_reload(layer):
        layer.weight = nn.Parameter(torch.ones(1, 4))
        layer.bias.data = torch.ones(1)
        layer.scheme.packed = torch.ones(4)
    now = [layer.weight, layer.bias, layer.scheme.packed]
    assert [tensor.data_ptr() for tensor in now] == places
    assert all(tensor.eq(1).all() for tensor in now)


def test_a_tensor_of_another_shape_is_an_error():
    layer = nn.Linear(4, 1)
    said = re.escape("bias has the shape (5,) after a reload instead of (1,)")
    repair = moved_tensors.around_reload(layer)
    with pytest.raises(RuntimeError, match=f"{said}: .* Use another rollout_quantization"), repair:
        layer.bias.data = torch.ones(5)


def test_the_repair_resets_cache_scales_that_vllm_does_not_save():
    layer = nn.Module()
    layer._k_scale = nn.Parameter(torch.tensor(0.0), requires_grad=False)
    layer.register_buffer("_v_scale", torch.tensor(0.5))
    with cache_scales.around_reload(layer):
        pass
    assert (layer._k_scale.item(), layer._v_scale.item()) == (1.0, 0.5)
