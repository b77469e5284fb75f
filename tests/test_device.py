"""Settings for a machine without an accelerator."""

import os
import subprocess
import sys

import pytest
import torch
from documents import ROOT

from trl_qurl.lab.device import full_precision


@pytest.mark.parametrize(("has_bf16", "name"), [(True, "bfloat16"), (False, "float16")])
def test_sixteen_bits_are_those_that_a_gpu_has(has_bf16, name, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: has_bf16)
    assert full_precision()[1] == name


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
def test_freed_memory_is_used_again():
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")
    }
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=environment, capture_output=True, check=True
    )
    freed, kept = map(int, done.stdout.split())
    assert kept < freed / 10
