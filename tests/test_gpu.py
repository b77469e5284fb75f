"""What only a GPU can show: `trl-qurl doctor` in every format, rounding on the GPU, and settings
that need one.
"""

import json
import subprocess
import sys

import pytest
import torch
from conftest import child_environment
from documents import ROOT
from support.deployment import Deployment
from tiny import ENGINE

from trl_qurl.lab.comparison import candidates
from trl_qurl.quantization.formats import SCHEMES, UNQUANTIZED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.xdist_group("gpu"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FORMATS = [*candidates(None), UNQUANTIZED]

SETTINGS = {
    "sleep": {"vllm_enable_sleep_mode": True},
    "FP8 cache": {"vllm_engine_kwargs": ENGINE | {"kv_cache_dtype": "fp8"}},
}


@pytest.fixture(scope="module")
def lines():
    """The whole report, by the names of its lines."""
    environment = child_environment(PYTHONPATH=str(ROOT))
    # which would hide what graphs do
    for name in ("OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "MASTER_PORT"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "trl_qurl", "doctor", "--json", "--scheme", ",".join(FORMATS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.stdout, done.stderr[-5000:]
    return {line["name"]: line for line in json.loads(done.stdout)["lines"]}


TRIED = [*(f"train-{form}" for form in FORMATS), "sleep"]


@pytest.mark.parametrize("name", ["packages", "vllm", "torch", "formats", *TRIED])
def test_line(name, lines):
    line = lines[name]
    said = f"{line['text']} {line['advice']}"
    log = line["data"].get("log", [])
    assert line["status"] in ("ok", "note"), "\n".join([said, *log])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_a_gpu_rounds_to_the_bits_of_a_cpu(scheme, dtype):
    # Millions of quotients: multiplying by reciprocals would change thousands. As wide as in 7B.
    weight = torch.randn(256, 18_944, generator=torch.Generator().manual_seed(0)).to(dtype)
    on_gpu = scheme.quantize(weight.cuda())
    for name, tensor in scheme.quantize(weight).items():
        found = on_gpu[name].cpu().view(torch.uint8)
        assert torch.equal(found, tensor.view(torch.uint8)), name


@pytest.mark.parametrize("name", SETTINGS)
def test_every_sync_is_right(name, train, tmp_path):
    settings = {
        "use_cpu": False,
        "sync_check_interval": 1,
        **SETTINGS[name],
    }
    [record] = train([tmp_path / "out", settings])
    assert record["is_proven"]
    assert record["probe_end"] != record["probe_start"], "the weights did not change"


def test_a_server_that_was_killed_gets_its_weights_again(train, warm_python, tmp_path):
    """On the trainer's GPU, of which it takes a part."""
    options = ("--scheme", "int8", "--gpu-memory-utilization", "0.3")
    deployment = Deployment(tmp_path, warm_python, *options)
    server = deployment.up().process.pid
    config = deployment.config(use_cpu=False, weight_sync="checkpoint")
    del config["max_steps"]
    given = ["--model", deployment.model, "--config", json.dumps(config), "--request-seed", "7"]
    [record] = train([tmp_path / "out", *given, "--kill-before-generation", server])
    deployment.close()
    assert sum(row.get("sync/recoveries", 0) for row in record["history"]) == 1
    assert record["is_proven"]
