"""`tools/cuda_contract.py`: two made-up wheels, one that trl-qurl could use and one that it could
not.
"""

import functools
import re
import sys
import zipfile

import pytest
from documents import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import cuda_contract  # noqa: E402

WORKER = "vllm/v1/worker/gpu_worker.py"


@pytest.fixture
def make_wheel(tmp_path):
    """Makes a wheel of the installed sources, with some replaced or added."""
    site = cuda_contract.contract.source_file("vllm").parents[1]

    def make(**changes):
        path = tmp_path / "vllm-0.0.0-py3-none-any.whl"
        sources = {
            str(file.relative_to(site)): file.read_bytes().decode()
            for file in (site / "vllm").rglob("*.py")
        }
        sources |= {name: change(sources.get(name, "")) for name, change in changes.items()}
        with zipfile.ZipFile(path, "w") as wheel:
            for name, text in sources.items():
                wheel.writestr(name, text)
        return str(path)

    return make


def states(printed):
    """The names that are not the same in both builds, and what is wrong with them."""
    return {
        name: state
        for state, name in re.findall(r"^  (DIFFERS|MISSING) *(\S+)$", printed, re.MULTILINE)
    }


def test_other_files_and_other_lines_may_differ(make_wheel, capfd, monkeypatch):
    # slow, and the next test runs it
    monkeypatch.setattr(cuda_contract, "run_contract", lambda site: True)
    wheel = make_wheel(
        **{
            "vllm/_version.py": lambda text: "version = '0.0.0'\n",
            "vllm/third_party/kernels.py": lambda text: "",
            WORKER: lambda text: text.replace("def execute_model(", "def run_model(") + "# more\n",
        }
    )
    assert cuda_contract.main([wheel]) == 0
    printed = capfd.readouterr().out
    assert not states(printed) and "same    vllm.v1.worker.gpu_worker.Worker.get_model\n" in printed
    differing = re.findall(r"^  vllm/.*", printed, re.MULTILINE)
    assert differing == [f"  {name} differs" for name in ("vllm/_version.py", WORKER)] + [
        "  vllm/third_party: 1 more in the wheel"
    ]


def test_a_name_that_is_gone_or_defined_otherwise_fails(make_wheel, capfd):
    replaced = {
        "def get_model(": "def model(",
        "before_sleep = torch.accelerator.get_memory_info()[0]": "before_sleep = 0",
    }
    wheel = make_wheel(
        **{
            WORKER: lambda text: functools.reduce(
                lambda t, item: t.replace(*item), replaced.items(), text
            )
        }
    )
    assert cuda_contract.main([wheel]) == 1
    printed = capfd.readouterr().out
    assert states(printed) == {
        "vllm.v1.worker.gpu_worker.Worker.get_model": "MISSING",
        "vllm.v1.worker.gpu_worker.Worker.sleep": "DIFFERS",
    }
    assert "Worker.get_model is gone: RolloutWorker repairs the model it returns" in printed


def test_a_package_is_compared_by_what_its_modules_define():
    name = cuda_contract.Name("vllm.model_executor.layers.fused_moe", "UnquantizedFusedMoEMethod")
    assert cuda_contract.source_of(name).count("\n    def ") > 5


@pytest.mark.parametrize("wheel", ["missing.whl", __file__.replace(".py", ".whl")])
def test_what_is_not_a_wheel_of_vllm(wheel, capsys):
    with pytest.raises(SystemExit, match="2"):
        cuda_contract.main([wheel])
    assert (
        "is not a wheel of vLLM: give the path of a wheel, or a release as vllm==0.31.0."
        in capsys.readouterr().err
    )
