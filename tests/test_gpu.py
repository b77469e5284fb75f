"""What only a GPU can show, each by the line of `trl-qurl doctor` that shows it to users.

One report for all tests.
"""

import json
import subprocess
import sys

import pytest
import torch
from conftest import child_environment
from documents import ROOT

from trl_qurl.lab.doctor.lines import FORMAT, LINES
from trl_qurl.quantization.formats import UNQUANTIZED, available_schemes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.xdist_group("gpu"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FORMATS = [*(scheme.name for scheme in available_schemes()), UNQUANTIZED]
NAMES = [
    name
    for line in LINES
    for name in ([line.replace(FORMAT, form) for form in FORMATS] if line.endswith(FORMAT) else [line])
]


@pytest.fixture(scope="module")
def lines():
    """The whole report, by the names of its lines."""
    environment = child_environment(PYTHONPATH=str(ROOT))
    for name in ("OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "MASTER_PORT"):  # which would hide what graphs do
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", "trl_qurl", "doctor", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.stdout, done.stderr[-5000:]
    return {line["name"]: line for line in json.loads(done.stdout)["lines"]}


@pytest.mark.parametrize("name", NAMES)
def test_line(name, lines):
    line = lines[name]
    assert line["status"] in ("ok", "note"), f"{line['text']} {line['advice']}\n" + "\n".join(
        line["data"].get("log", [])
    )
