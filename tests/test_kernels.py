"""Which hardware runs what: one table in the schemes, which vLLM's own choice of kernels and the pages agree with."""

import os
import re
from types import SimpleNamespace

import pytest
from documents import ROOT

from trl_qurl.lab import device
from trl_qurl.quantization import SCHEMES
from trl_qurl.rollout.engine import kernels, launch
from trl_qurl.rollout.engine.kernels import kernel_environment

GENERATIONS = {"Turing": (7, 5), "Ampere": (8, 0), "Ada": (8, 9), "Hopper": (9, 0), "Blackwell": (10, 0)}
CUTLASS, TRITON = "CutlassInt8ScaledMMLinearKernel", "TritonInt8ScaledMMLinearKernel"


@pytest.fixture
def on(monkeypatch):
    """Let this machine have a GPU of a compute capability."""

    def on(capability):
        monkeypatch.setattr(kernels, "gpu_capability", lambda: capability)

    monkeypatch.delenv("VLLM_DISABLED_KERNELS", raising=False)
    return on


@pytest.fixture
def chosen(monkeypatch):
    """vLLM's own choice of an INT8 kernel for our layers, on a CUDA GPU of a compute capability."""
    from vllm import envs
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm import cutlass, triton
    from vllm.platforms import PlatformEnum

    cuda = SimpleNamespace(_enum=PlatformEnum.CUDA, is_cuda=lambda: True, is_cuda_alike=lambda: True)
    for module in (linear, cutlass, triton):
        monkeypatch.setattr(module, "current_platform", cuda)

    def choose(capability):
        disabled = [name for name in os.environ.get("VLLM_DISABLED_KERNELS", "").split(",") if name]
        # As vLLM reads it, but for its cache, which an engine of another test may have filled.
        monkeypatch.setattr(envs, "VLLM_DISABLED_KERNELS", disabled, raising=False)
        cuda.get_device_capability = lambda: capability
        kernel = linear.init_int8_linear_kernel(
            is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name="layer"
        )
        return type(kernel).__name__

    return choose


@pytest.mark.parametrize("capability", [(7, 5), (9, 0), (10, 0), (12, 0), (12, 1)])
def test_vllm_takes_an_int8_kernel_that_works(capability, on, chosen, monkeypatch):
    on(capability)
    assert chosen(capability) == CUTLASS, "vLLM declines it by itself now: kernel_fault may not be needed any more"
    for name, value in kernel_environment(SCHEMES["int8"]).items():
        monkeypatch.setenv(name, value)
    assert chosen(capability) == (CUTLASS if capability < (10, 0) else TRITON)


def test_the_environment_is_the_same_for_every_format_and_the_users_wins(on, monkeypatch):
    assert kernel_environment(SCHEMES["int8"]) == {}  # a CPU
    on((10, 0))
    for scheme in (None, *SCHEMES.values()):  # vLLM reads it once, and the next engine in the process may be INT8
        assert kernel_environment(scheme) == {"VLLM_DISABLED_KERNELS": CUTLASS}
    environment = launch.server_environment("127.0.0.1", 8000, "key", "int8")
    assert environment["VLLM_DISABLED_KERNELS"] == CUTLASS
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "MarlinLinearKernel")
    assert kernel_environment(SCHEMES["int8"]) == {}


def test_without_another_kernel_the_format_is_refused(on, monkeypatch):
    on((12, 0))
    monkeypatch.setattr("importlib.import_module", lambda name: SimpleNamespace())
    with pytest.raises(
        ValueError, match=f"no {TRITON}.* compute capability 12.0: choose another rollout_quantization"
    ):
        kernel_environment(SCHEMES["int8"])
    assert kernel_environment(SCHEMES["fp8"])


def test_the_page_about_formats_says_what_the_schemes_say():
    page = (ROOT / "docs" / "choosing.md").read_text()
    for generation, capability in GENERATIONS.items():
        [row] = re.findall(rf"^\| NVIDIA [^|]*\b{generation}\b.*$", page, re.MULTILINE)
        named = set(SCHEMES) if "| any" in row else set(re.findall(r'`"(\w+)"`', row))
        assert named == {name for name, scheme in SCHEMES.items() if scheme.runs_on(capability)}, row


@pytest.mark.parametrize(("supported", "expected"), [(True, ("BF16", "bfloat16")), (False, ("FP16", "float16"))])
def test_sixteen_bits_are_those_of_the_gpu(supported, expected, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: supported)
    assert device.full_precision() == expected


def test_bench_measures_in_the_sixteen_bits_of_the_gpu(monkeypatch, tmp_path):
    from tiny import tiny_model

    from trl_qurl.lab.bench import worker
    from trl_qurl.lab.bench.workload import Job, Workload

    started = {}
    monkeypatch.setattr("vllm.LLM", lambda **arguments: started.update(arguments))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(kernels, "gpu_capability", lambda: (7, 5))
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "")
    worker.start_engine(Job(str(tmp_path), "int8", Workload(), 1.0), tiny_model())
    assert started["dtype"] == "float16"
