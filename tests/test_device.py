"""Settings for a machine without an accelerator."""

import os
import subprocess
import sys

import pytest
import torch
from documents import ROOT

FAULTS = """
import resource, torch
from trl_qurl.lab.device import keep_freed_memory
if {keeps}: keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.empty(2**24).fill_(1)  # 64 MB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()  # the heap grows
print(faults())
"""


def page_faults(keeps: bool) -> int:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", FAULTS.format(keeps=keeps)]
    done = subprocess.run(command, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory is kept on CPUs only")
def test_freed_memory_is_used_again():
    assert page_faults(keeps=True) < page_faults(keeps=False) / 10
