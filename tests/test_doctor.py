"""`trl-qurl doctor`: true and complete where all is well, one sentence where it is not, and never a secret."""

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import child_environment
from documents import ROOT
from test_errors import HIDE

from trl_qurl import cli
from trl_qurl.lab.doctor import device, driver, examination, machine, packages
from trl_qurl.lab.doctor.lines import FORMAT, LINES, Status, note
from trl_qurl.lab.doctor.plan import plan
from trl_qurl.lab.doctor.report import as_text, skipped_as_text
from trl_qurl.lab.doctor.trial import try_job
from trl_qurl.quantization.formats import SCHEMES, UNQUANTIZED

PRIVATE = {
    "HF_TOKEN": "hf_secret",
    "VLLM_API_KEY": "key-secret",
    "HF_HOME": "/home/somebody/models",
    "PATH_OF_MINE": "/home/somebody",
    "HOME": "/home/somebody",
    "NCCL_DEBUG": "WARN",
}


def doctor(*arguments, python=sys.executable, timeout=300, before=(), **environment):
    """The command as a user starts it; standard output and exit status."""
    environment = child_environment(**{"COLUMNS": "118", **environment})
    environment.pop("MASTER_PORT")
    places = environment.get("PYTHONPATH", "").split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join([*filter(None, places), str(ROOT)])
    command = [*before, python, "-m", "trl_qurl", "doctor", *arguments]
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=timeout)
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return done


def lines_of(done):
    """The lines of a report in JSON, by name."""
    return {line["name"]: line for line in json.loads(done.stdout)["lines"]}


# A machine on which all is well --------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.xdist_group("doctor")
def test_what_works_is_shown_by_trying_it(warm_python, tmp_path):
    formats = ["--formats", "int8"]
    tried = ["python", "packages", "variables", "gpus", "engine-int8", "train-int8", "probe-int8", "graphs"]
    home = {**PRIVATE, "HOME": str(tmp_path)}
    done = doctor("--json", *formats, "--only", *tried, python=warm_python, VLLM_LOGGING_LEVEL="ERROR", **home)
    found = lines_of(done)
    assert list(found) == tried
    assert json.loads(done.stdout)["works"] and done.returncode == 0, done.stdout
    if not torch.cuda.is_available():
        assert found["engine-int8"]["data"]["kernels"] == ["CPUInt8ScaledMMLinearKernel"]
        assert (found["graphs"]["status"], found["graphs"]["text"]) == ("skipped", "needs a GPU")
    trained, probed = found["train-int8"]["data"], found["probe-int8"]["data"]
    assert len(trained["kl"]) == 3 and all(0 <= kl < 1e-3 for kl in trained["kl"])
    assert len(probed["ratios"]) == 4 and len(set(probed["distances"])) == 4, "the weights did not change"
    assert "secret" not in done.stdout and "somebody" not in done.stdout and str(tmp_path) not in done.stdout
    variables = found["variables"]["data"]["variables"]
    assert {"HF_TOKEN (set)", "VLLM_API_KEY (set)", "HF_HOME (set)", "NCCL_DEBUG=WARN"} <= set(variables)
    assert "PATH_OF_MINE" not in found["variables"]["text"]


def test_quick_starts_no_engine(warm_python):
    done = doctor("--quick", "--formats", "int8", python=warm_python, COLUMNS="100")
    assert done.returncode == 0, done.stdout
    shown = " ".join(done.stdout.split())
    for name in {"python", "packages", "driver", "vllm", "cpu", "memory", "shm", "ports", "torch", "formats"}:
        assert re.search(rf"^(ok|note) +{name} ", done.stdout, re.MULTILINE), name
    assert "engine-int8 --quick starts no engine; also train-int8, probe-int8, padded" in shown
    assert "All checks passed" in done.stdout.splitlines()[-1]
    assert max(map(len, done.stdout.splitlines())) <= 100


# Broken in five ways, and some more ----------------------------------------------------------------------------------


def test_without_vllm(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    done = doctor("--formats", "int8", PYTHONPATH=str(tmp_path), HIDDEN="vllm")
    assert done.returncode == 1
    assert "FAILED  vllm          vLLM is not installed, but training requires it.\n" in done.stdout
    assert "-> Run `pip install 'trl-qurl[vllm]'`" in done.stdout
    assert re.search(r"skipped engine-int8 +depends on the line vllm, which failed; also train-int8", done.stdout)
    assert done.stdout.splitlines()[-1].startswith("FAILED: vllm (")


@pytest.mark.parametrize(
    ("version", "status"), [("0.14.0", Status.FAILED), ("0.19.0", Status.OK)], ids=["wrong", "right"]
)
def test_a_version_of_compressed_tensors(version, status, tmp_path):
    metadata = tmp_path / f"compressed_tensors-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: compressed-tensors\nVersion: {version}\n")
    done = doctor("--only", "packages", "--json", PYTHONPATH=str(tmp_path))
    line = lines_of(done)["packages"]
    assert (line["status"], done.returncode) == (status, int(status is Status.FAILED))
    if status is Status.FAILED:
        assert "compressed-tensors 0.14.0 is installed, but trl-qurl requires compressed-tensors>=0.17" in line["text"]
        assert line["advice"] == "Run `pip install 'compressed-tensors>=0.17'`."


def test_bounds_of_an_extra_hold_beside_its_own_package(monkeypatch):
    versions = {"transformers": "5.19.0", "llmcompressor": None}
    monkeypatch.setattr(packages, "installed", lambda name: (name, versions[name]))
    asked = ["transformers>=5.10.4", 'transformers<5.18; extra == "llmcompressor"']
    monkeypatch.setattr(packages.importlib.metadata, "requires", lambda name: asked)
    assert not list(packages.find_misfits())
    versions["llmcompressor"] = "0.14.0.1"
    [(problem, _)] = packages.find_misfits()
    assert problem == "transformers 5.19.0 is installed, but trl-qurl requires transformers<5.18"


def test_no_space_in_shared_memory():
    inside = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    start = ["unshare", "--mount", "sh", "-c", inside, "sh"]
    if subprocess.run([*start, "true"], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs privileges")
    done = doctor("--only", "shm", before=start)
    assert done.returncode == 1
    assert "/dev/shm has 0.1 MiB free; vLLM's server and NCCL need at least 64 MiB there." in done.stdout
    assert "-> Start the container with --shm-size=8g" in done.stdout


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = doctor("--only", "ports", "--port", port)
        assert done.returncode == 1 and f"Port {port} is taken." in done.stdout
        assert "-> Start the server with another --port, or stop the process that listens there." in done.stdout
    assert doctor("--only", "ports", "--port", port).returncode == 0


@pytest.mark.vllm
@pytest.mark.xdist_group("doctor")
@pytest.mark.skipif(torch.cuda.is_available(), reason="another kernel takes its place on a GPU")
def test_an_engine_that_cannot_start(warm_python):
    broken = {"VLLM_DISABLED_KERNELS": "CPUInt8ScaledMMLinearKernel", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = doctor("--formats", "int8", "--only", "engine-int8", "train-int8", python=warm_python, **broken)
    assert done.returncode == 1, done.stdout
    assert re.search(r"^FAILED  engine-int8 ", done.stdout, re.MULTILINE)
    assert "-> vLLM has no kernel for this format here, or VLLM_DISABLED_KERNELS disables it" in done.stdout
    assert re.search(r"^skipped train-int8 +engine-int8 failed", done.stdout, re.MULTILINE)


class Trial:
    """A job that is a program of the test's own, which writes a first line."""

    lines = ("first", "second", "third")
    start = """
import os, signal, sys, time
def write(line):
    with open(sys.argv[1], "a") as file:
        file.write(line + "\\n")
write('{"name": "first", "status": "ok", "text": "", "advice": "", "data": {}}')
print("about to", flush=True)
"""

    def __init__(self, end):
        self.end = end

    def command(self, result):
        return [sys.executable, "-c", self.start + self.end, str(result)]


@pytest.mark.parametrize(
    ("end", "text", "advice"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV; last output: about to", "open an issue"),
        ("time.sleep(60)", "did not finish within 3 s; last output: about to", "open an issue"),
        ("sys.exit('CUDA out of memory')", "exited with status 1; last output: CUDA out of mem", "Another"),
        ('write(\'{"error": "OSError: Address already in use"}\')', "OSError: Address already", "is using the port"),
    ],
)
def test_a_process_that_crashes_hangs_or_fails_is_a_line(end, text, advice):
    found = []
    try_job(Trial(end), None, 3.0, found.append)
    statuses = [Status.OK, Status.FAILED, Status.SKIPPED]
    assert [(line.name, line.status) for line in found] == list(zip(Trial.lines, statuses, strict=True))
    assert found[1].text.startswith(text) and advice in found[1].advice
    assert found[2].text == "second failed"


def test_what_cannot_be_determined_says_so(monkeypatch):
    def broken():
        raise RuntimeError("no such file")

    monkeypatch.setattr(machine, "check_memory", broken)
    [line] = examination.examine(lambda line: None, only=["memory"])
    assert line == note("memory", "could not be determined (RuntimeError: no such file).")


def test_a_line_that_does_not_exist(capsys):
    assert cli.main(["doctor", "--only", "divison"]) == 2
    assert "Unknown line 'divison'; did you mean division? Choose from python, packages" in capsys.readouterr().err
    assert cli.main(["doctor", "--formats", "int4"]) == 2
    assert "Unknown quantization scheme 'int4'; did you mean 'int8'?" in capsys.readouterr().err


# The parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "cuda", "status", "text"),
    [
        ("580.65.06", "13.0", Status.OK, "runs builds for CUDA 13.0"),
        ("590.10", "12.9", Status.OK, "runs builds for CUDA 12.9"),
        ("550.54.15", "12.9", Status.OK, "runs builds for CUDA 12.9"),
        ("575.57.08", "13.0", Status.FAILED, "needs NVIDIA driver 580 or newer, but this machine has 575.57.08"),
        ("470.82.01", "12.9", Status.FAILED, "needs NVIDIA driver 525 or newer"),
        ("580.65.06", None, Status.FAILED, "torch is built without CUDA"),
        (None, "13.0", Status.NOTE, "no NVIDIA driver, although torch is built for CUDA 13.0"),
        (None, None, Status.OK, "everything runs on the CPU"),
    ],
)
def test_a_driver_and_the_cuda_of_torch(version, cuda, status, text, monkeypatch):
    monkeypatch.setattr(driver.shutil, "which", lambda name: None)
    line = driver.judge_driver(version, cuda)
    assert line.status is status and text in line.text
    if version == "575.57.08":
        assert "install builds for CUDA 12" in line.advice
        monkeypatch.setenv(driver.COMPATIBILITY, "1")
        assert driver.judge_driver(version, cuda).status is Status.NOTE


def test_the_page_on_installation_has_the_same_drivers():
    page = (ROOT / "docs" / "installation.md").read_text()
    newest, *older = driver.OLDEST_DRIVERS.items()
    assert f"| {newest[1]} or newer | {newest[0]} and" in page
    for (cuda, oldest), (_, next_one) in zip(older, [newest, *older][:-1], strict=True):
        assert f"| {oldest} to {next_one - 1} | {cuda} |" in page


def test_the_driver_is_asked_and_torch_not_imported(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 575.57.08\n")
    smi.chmod(0o755)
    (tmp_path / "torch").mkdir()  # the real one cannot be imported where the driver is too old
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    (tmp_path / "torch" / "version.py").write_text("debug = False\ncuda: Optional[str] = '13.0'\n")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = doctor("--json", "--only", "driver", "torch", "engine-int8", PYTHONPATH=str(tmp_path), PATH=path)
    found = lines_of(done)
    assert "needs NVIDIA driver 580 or newer, but this machine has 575.57.08" in found["driver"]["text"]
    assert found["torch"]["status"] == "failed" and "libcudart.so.13: cannot open" in found["torch"]["text"]
    assert "install both together" in found["torch"]["advice"]
    smi.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    done = doctor("--only", "driver", PYTHONPATH=str(tmp_path), PATH=path)
    assert "nvidia-smi does not respond" in done.stdout and done.returncode == 1


def test_the_formats_of_a_gpu():
    # vLLM: INT8, W4A16, W8A16 and NVFP4A16 starting with Turing, FP8 starting with Ada, its blocks starting with
    # Hopper, MXFP8 starting with Blackwell; no W8A16 or NVFP4A16 on a CPU.
    capabilities = [(7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0), None]  # None: a CPU
    formats = [[name for name, scheme in SCHEMES.items() if scheme.runs_on(capability)] for capability in capabilities]
    assert formats == [
        [],
        ["int8", "w4a16", "w8a16", "nvfp4a16"],
        ["int8", "w4a16", "w8a16", "nvfp4a16"],
        ["int8", "fp8", "w4a16", "w8a16", "nvfp4a16"],
        ["int8", "fp8", "fp8_block", "w4a16", "w8a16", "nvfp4a16"],
        ["int8", "fp8", "fp8_block", "mxfp8", "w4a16", "w8a16", "nvfp4a16"],
        ["int8", "fp8", "fp8_block", "mxfp8", "w4a16", "w8a16", "nvfp4a16"],
        ["int8", "w4a16"],
    ]


def test_division_is_compared_bit_for_bit(monkeypatch):
    assert device.compare_division(torch.device("cpu")).status is Status.OK

    class ByReciprocal:
        """A format whose second device divides by a number as by its reciprocal, as CUDA does."""

        name, calls = "int8", 0

        def quantize(self, weight):
            self.calls += 1
            absmax = weight.abs().amax(-1)
            return {"weight_scale": absmax / 127.5 if self.calls % 2 else absmax * (1 / 127.5)}

    monkeypatch.setattr(device, "SCHEMES", {"int8": ByReciprocal()})
    line = device.compare_division(torch.device("cpu"))
    assert line.status is Status.FAILED
    assert re.search(r"cpu rounds differently from the CPU: [\d.]+% of int8 weight_scale \(float32\)", line.text)


def test_a_trainer_sees_the_first_gpu_only(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert (examination.first_gpu(2), examination.first_gpu(0)) == ("4", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert (examination.first_gpu(8), examination.first_gpu(0)) == ("0", None)


def test_vllm_must_fit_torch_and_the_device(monkeypatch):
    versions = {"vllm": "0.31.0", "torch": "2.12.0+cu130"}
    monkeypatch.setattr(packages, "installed", lambda name: (name, versions[name]))
    monkeypatch.setattr(packages.importlib.metadata, "requires", lambda name: ["torch==2.13.0", "numpy"])
    monkeypatch.setattr(packages, "driver_version", lambda: "580.65.06")
    assert packages.check_vllm().text == "vllm 0.31.0 is built for torch==2.13.0, but torch 2.12.0+cu130 is installed."
    versions["torch"] = "2.13.0+cu130"
    assert packages.check_vllm().status is Status.OK
    monkeypatch.setattr(packages, "driver_version", lambda: None)
    assert "is built for GPUs, but no NVIDIA driver responds" in packages.check_vllm().text


def test_lines_wrap_and_skipped_ones_are_put_together():
    line = note("memory", "word " * 40, "Do this.")
    wrapped = as_text(line).splitlines()
    assert len(wrapped) > 2 and all(part.startswith(" " * 22) for part in wrapped[1:])
    assert wrapped[-1].strip() == "-> Do this."
    lines = [replace(line, name=name, status=Status.SKIPPED, text="needs a GPU") for name in ("a", "b", "c")]
    assert skipped_as_text(lines) == ["skipped a             needs a GPU; also b, c"]


def test_every_line_is_explained():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    table = page.partition("## What works on this machine")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE) == list(LINES)


def test_every_planned_line_has_a_name():
    names = [name for job in plan([*SCHEMES, UNQUANTIZED]) for name in job.lines]
    assert len(names) == len(set(names))
    general = {re.sub(rf"-({'|'.join([*SCHEMES, UNQUANTIZED])})$", f"-{FORMAT}", name) for name in names}
    assert general <= LINES.keys()
    assert LINES.keys() - general == {*examination.inspections(None), "torch", "gpus", "formats", "division"}
