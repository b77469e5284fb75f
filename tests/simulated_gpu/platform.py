"""vLLM's own platform for CUDA with the compute capability of a chosen GPU, and its compiled
operators for loading.

Each repacking operator is a fixed permutation with the real output's shape. So "the same weights
give the same kernel tensors" can be checked value by value, but nothing can be computed.
"""

import sys
import types

import torch

from simulated_gpu import humming

GPUS = {
    "T4": (7, 5),
    "A100": (8, 0),
    "RTX 40": (8, 9),
    "H100": (9, 0),
    "B200": (10, 0),
    "RTX 50": (12, 0),
}
"""One GPU of each generation, with its compute capability."""

COMPILED = (
    "_C_stable_libtorch",
    "_moe_C_stable_libtorch",
    "vllm_flash_attn._vllm_fa2_C",
    "vllm_flash_attn._vllm_fa3_C",
)
"""Modules of vLLM's CUDA build that the CPU build lacks."""

SCHEMAS = {
    "gptq_marlin_repack": "(Tensor b_q_weight, SymInt size_k, SymInt size_n, int num_bits, bool is_a_8bit) -> Tensor",
    "machete_prepack_B": "(Tensor B, ScalarType a_type, int b_type, ScalarType? group_scales_type) -> Tensor",
    "cutlass_scaled_mm_supports_fp8": "(int cuda_device_capability) -> bool",
    "cutlass_scaled_mm_supports_block_fp8": "(int cuda_device_capability) -> bool",
    "cutlass_scaled_mm_supports_fp4": "(int cuda_device_capability) -> bool",
    "cutlass_group_gemm_supported": "(int cuda_device_capability) -> bool",
    # Looked up when layers are made, and called only by a forward pass.
    "silu_and_mul": "(Tensor! result, Tensor input) -> ()",
    "gelu_and_mul": "(Tensor! out, Tensor input) -> ()",
    "gelu_tanh_and_mul": "(Tensor! out, Tensor input) -> ()",
    "swigluoai_and_mul": "(Tensor! out, Tensor input, float alpha=1.702, float limit=7.0) -> ()",
    "rms_norm": "(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()",
    "fused_add_rms_norm": "(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()",
    "static_scaled_fp8_quant": "(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()",
    "dynamic_scaled_fp8_quant": "(Tensor! result, Tensor input, Tensor! scale) -> ()",
    "dynamic_per_token_scaled_fp8_quant": "(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()",
}
"""Operators as the CUDA wheel of vLLM 0.32 registers them."""

SUPPORTED = {
    "cutlass_scaled_mm_supports_fp8": lambda capability: capability >= 89,
    "cutlass_scaled_mm_supports_block_fp8": lambda capability: capability >= 90,
    "cutlass_scaled_mm_supports_fp4": lambda capability: capability >= 100,
    "cutlass_group_gemm_supported": lambda capability: 90 <= capability < 110,
}
"""Answers of vLLM's compiled code for CUDA 13."""

_libraries = []  # must outlive their registrations


installed = {"humming", "deep_gemm"}
"""Packages that vLLM finds in addition to the installed ones."""


def install(gpu):
    """Let vLLM find this GPU. It must not have imported its layers yet: they ask for the platform
    when imported.
    """
    assert "vllm.model_executor" not in sys.modules
    register_operators()
    humming.install()
    for name in COMPILED:
        sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")
    import vllm.platforms
    import vllm.triton_utils
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class SimulatedCuda(CudaPlatformBase):
        device_type = "cpu"  # where tensors really are

        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(*GPUS[gpu])

        @classmethod
        def get_device_name(cls, device_id=0):
            return gpu

        @classmethod
        def get_device_total_memory(cls, device_id=0):
            return 80 * 2**30

        @classmethod
        def get_current_memory_usage(cls, device=None):
            return 0

        @classmethod
        def is_pin_memory_available(cls):
            return False

        @classmethod
        def get_punica_wrapper(cls):
            return "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"  # no Triton

        @classmethod
        def import_kernels(cls):
            pass

        @classmethod
        def num_compute_units(cls, device_id=0):
            return 108

    vllm.platforms._current_platform = SimulatedCuda()
    # vLLM's placeholder has no field, and on Hopper kernels of Mamba are chosen by this one
    vllm.triton_utils.triton.Config = lambda *_, **__: types.SimpleNamespace(num_stages=1)
    import vllm.utils.flashinfer as flashinfer
    import vllm.utils.humming
    import vllm.utils.import_utils as imports

    vllm.utils.humming._patched = True  # it would repair what our double does not have
    has_module = imports._has_module
    imports._has_module = lambda name: name.rpartition(".")[2] in installed or has_module(name)
    for name in ("has_flashinfer", "has_flashinfer_cutedsl", "has_flashinfer_fp8_blockscale_gemm"):
        setattr(flashinfer, name, lambda: "flashinfer" in installed)
    torch.accelerator.max_memory_allocated = lambda *_: 0
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.current_device_index = lambda: 0


def permuted(tensor, seed):
    """The rows of a tensor in another order, always the same for this number of rows."""
    generator = torch.Generator().manual_seed(seed)
    return tensor[torch.randperm(len(tensor), generator=generator)]


def gptq_marlin_repack(weight, size_k, size_n, num_bits, is_a_8bit):
    return permuted(weight.reshape(-1), 1).reshape(size_k // 16, size_n * 16 // (32 // num_bits))


def machete_prepack(weight, a_type, b_type, group_scales_type):
    return permuted(weight.contiguous().reshape(-1), 2).reshape(weight.shape)


def register_operators():
    library = torch.library.Library("_C", "FRAGMENT")
    _libraries.append(library)
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
    library.impl("gptq_marlin_repack", gptq_marlin_repack, "CPU")
    library.impl("machete_prepack_B", machete_prepack, "CPU")
    for name, rule in SUPPORTED.items():
        library.impl(name, rule, "CompositeExplicitAutograd")
