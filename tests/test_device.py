"""Settings for a machine without an accelerator."""

import os
import sys

import pytest
import torch
from conftest import completed
from documents import ROOT

from trl_qurl import cli
from trl_qurl.lab.device import full_precision
from trl_qurl.lab.recipes.arguments import parse


@pytest.mark.parametrize(
    ("capability", "expected"), [((8, 0), ("BF16", "bfloat16")), ((7, 5), ("FP16", "float16"))]
)
def test_sixteen_bits_are_those_that_a_gpu_has(capability, expected, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    assert full_precision() == expected


@pytest.mark.parametrize(
    ("capability", "given", "expected"),
    [
        ((7, 5), [], ["fp16"]),
        ((7, 5), ["--config", "lora_w4"], ["fp16"]),
        ((7, 5), ["--bf16", "false"], []),
        ((8, 0), ["--config", "lora_w4"], ["bf16"]),
    ],
)
def test_a_gpu_without_bfloat16_trains_in_float16(capability, given, expected, monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setattr("trl_qurl.quantization.formats.gpu_capability", lambda: capability)
    _, training, _ = parse("grpo", given)
    assert [name for name in ("bf16", "fp16") if getattr(training, name)] == expected


@pytest.mark.parametrize(
    ("variables", "chosen"),
    [
        ({}, "0"),
        ({"CUDA_VISIBLE_DEVICES": "3,4"}, "3"),
        ({"CUDA_VISIBLE_DEVICES": "3,4", "LOCAL_RANK": "1"}, "3,4"),
    ],
)
def test_without_a_launcher_one_of_several_gpus_is_visible(variables, chosen, monkeypatch, capsys):
    """Stop where the command begins to ask CUDA."""
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # recorded, and restored afterwards
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("trl_qurl.lab.recipes.arguments.cpu_settings", lambda: int("stop"))
    assert cli.main(["grpo"]) == 2
    assert os.environ["CUDA_VISIBLE_DEVICES"] == chosen
    is_said = "LOCAL_RANK" not in variables
    assert (f"Using GPU {chosen}, one of 2" in capsys.readouterr().err) == is_said


FAULTS = """
import resource, torch
from trl_qurl.lab.device import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.empty(2**24).fill_(1)  # 64 MB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults())
keep_freed_memory()
for _ in range(3):
    faults()  # the heap grows
print(faults())
"""


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory is kept on CPUs only")
def test_freed_memory_is_used_again(monkeypatch):
    for name in [*os.environ]:
        if name.startswith("MALLOC_"):
            monkeypatch.delenv(name)
    done = completed(sys.executable, "-c", FAULTS, PYTHONPATH=ROOT)
    freed, kept = map(int, done.stdout.split())
    assert kept < freed / 10
