"""Which hardware runs what: one table in the schemes, which vLLM's own choice of kernels and the
pages agree with.
"""

import pytest
import torch

from trl_qurl.lab.activations import round_activations
from trl_qurl.lab.comparison import candidates
from trl_qurl.quantization import SCHEMES
from trl_qurl.rollout.checks import hardware
from trl_qurl.rollout.checks.hardware import kernel_environment

CUTLASS = "CutlassInt8ScaledMMLinearKernel"
DEEP_GEMM = ["FlashInferFp8DeepGEMMDynamicBlockScaledKernel", "DeepGemmFp8BlockScaledMMKernel"]


@pytest.fixture
def on(monkeypatch):
    """Let this machine have a GPU of a compute capability."""

    def on(capability):
        monkeypatch.setattr(hardware, "gpu_capability", lambda: capability)

    monkeypatch.delenv("VLLM_DISABLED_KERNELS", raising=False)
    return on


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_rounded_as_vllm_does_it_without_a_gpu(dtype):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    sizes = torch.tensor([3.0, 0.1, 1e4, 1.0, 1.0, 1.0])
    tokens = (torch.randn(6, 256) * sizes[:, None]).to(dtype)
    tokens[3, :128] = 0
    tokens[4, :32] = 448
    tokens[5, 0] = 448 * 64 + 128
    tokens[4, 1] = 2**-9  # the smallest code beside the largest
    with set_current_vllm_config(VllmConfig()):
        quant = QuantFP8(static=False, group_shape=GroupShape(1, 128), use_ue8m0=False)
    codes, scale = quant.forward_native(tokens)
    blocks = codes.float().unflatten(-1, (-1, 128)) * scale.unsqueeze(-1)
    expected = blocks.flatten(-2).to(dtype)
    assert torch.equal(round_activations(tokens, "fp8_block"), expected)


def test_the_environment_is_the_same_for_every_format_and_the_users_wins(on, monkeypatch):
    assert kernel_environment(SCHEMES["int8"]) == {"VLLM_USE_AOT_COMPILE": "0"}  # a CPU
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "1")
    assert kernel_environment(SCHEMES["int8"]) == {}
    on((9, 0))
    assert kernel_environment(SCHEMES["int8"]) == {"VLLM_DISABLED_KERNELS": ",".join(DEEP_GEMM)}
    on((10, 0))
    disabled = ",".join([CUTLASS, *DEEP_GEMM])
    # vLLM reads it once, and the next engine in the process may be another.
    assert kernel_environment() == {"VLLM_DISABLED_KERNELS": disabled}
    assert kernel_environment(*SCHEMES.values()) == {"VLLM_DISABLED_KERNELS": disabled}
    for scheme in SCHEMES.values():
        assert kernel_environment(scheme) == {"VLLM_DISABLED_KERNELS": disabled}
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "MarlinLinearKernel")
    assert kernel_environment(SCHEMES["int8"]) == {}


@pytest.mark.parametrize(
    ("capability", "scheme", "message"),
    [
        ((8, 0), "fp8", "FP8 .* capability 8.9 or higher: .* for int8, w4a16, w8a16."),
        ((8, 9), "fp8_block", "capability 9.0 or higher: .* for int8, fp8, w4a16, w8a16."),
    ],
)
def test_a_format_that_vllm_runs_by_another_kernel_is_refused(
    capability, scheme, message, on, monkeypatch
):
    on(capability)
    with pytest.raises(ValueError, match=message):
        kernel_environment(SCHEMES[scheme])
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "")  # which says nothing about those that are left
    with pytest.raises(ValueError, match=message):
        kernel_environment(SCHEMES[scheme])
    assert kernel_environment() == kernel_environment(SCHEMES["int8"]) == {}
    assert scheme not in candidates(None)
    assert candidates([scheme])


def test_kernels_of_cpus_with_amx_refuse_what_we_refuse(monkeypatch):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        RoutingMethodType,
        get_routing_method_type,
    )
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsInt8
    from vllm.model_executor.layers.utils import check_cpu_sgl_kernel

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert check_cpu_sgl_kernel(128, 128, torch.int8), (
        "INT8 has another kernel there: hardware.py refuses too much"
    )
    by_softmax = set()
    for renormalizes in (True, False):
        by_softmax.add(get_routing_method_type("softmax", 2, renormalizes, None, False))
    supported = set()
    for method in RoutingMethodType:
        if CPUExpertsInt8._supports_routing_method(method, None, None):
            supported.add(method)
    assert by_softmax < supported == by_softmax | {RoutingMethodType.Renormalize}
    assert [each for each in MoEActivation if CPUExpertsInt8._supports_activation(each)] == [
        MoEActivation.SILU
    ]
    assert not CPUExpertsInt8.supports_lora()
