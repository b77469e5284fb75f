"""What vLLM can run on this machine: kernels that work on its GPU; on a CPU, layers and the memory
that is free.
"""

import importlib.util
import logging
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from trl_qurl.quantization.checkpoint_form import expert_layers
from trl_qurl.quantization.formats import SCHEMES, gpu_capability
from trl_qurl.quantization.scheme import QuantizationScheme
from trl_qurl.rollout.repairs import ahead_of_time

logger = logging.getLogger(__name__)
DISABLED_KERNELS_VARIABLE = "VLLM_DISABLED_KERNELS"  # vLLM's: class names, separated by commas
# vLLM's model classes that run transformers' code, and their module.
BACKENDS = [
    f"Transformers{variant}ForCausalLM" for variant in ("", "MoE", "MultiModal", "MultiModalMoE")
]
BACKEND_MODULE = "vllm.model_executor.models.transformers"
EXPERTS = r"re:.*\.experts\."  # pattern of all experts, for `quantization_ignore`
# `model_type`; read in vLLM's code
ROUTED_BY_SOFTMAX = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# tokens on a CPU: SmolLM2-135M in INT8 gains 2 ms a token, and loses a minute first
WORTH_COMPILING = 30_000


def available_formats() -> list[str]:
    """Return the formats that vLLM has kernels for on this machine."""
    missing = (
        []
        if has_flashinfer()
        else [name for name, scheme in SCHEMES.items() if scheme.needs_flashinfer]
    )
    return [
        name
        for name, scheme in SCHEMES.items()
        if scheme.runs_on(gpu_capability()) and name not in missing
    ]


def has_flashinfer() -> bool:
    """Return whether vLLM takes FlashInfer's kernels, for which it needs a package of them, or
    CUDA's compiler.
    """
    has_kernels = importlib.util.find_spec("flashinfer_cubin") or shutil.which("nvcc")
    return bool(has_kernels and importlib.util.find_spec("flashinfer"))


def kernel_environment(*schemes: QuantizationScheme) -> dict[str, str]:
    """Return the environment that vLLM needs before an engine of these formats starts, but for what
    the user has set.

    On a CPU, vLLM 0.31 saves what it compiles ahead of time but never loads it (docs/upstream.md).
    Without that, torch's own cache shortens the next start. Logs a warning if INT8 is inexact
    there. On a GPU the environment is the same for all formats, because vLLM reads it once per
    process. Raises `ValueError` if none of vLLM's kernels for a format works on this GPU: with a
    weight-only kernel, activations would stay exact.
    """
    capability = gpu_capability()
    if capability is None:
        if saturates() and any(scheme.checkpoint_format == "int-quantized" for scheme in schemes):
            advice = (
                "Good for a trial. Exact: rollout_quantization=None, vllm_engine_kwargs={'dtype': "
                "'float32'}."
            )
            logger.warning(
                "This CPU has no VNNI, so vLLM's INT8 sums saturate, and the actor is rougher. %s",
                advice,
            )
        return ahead_of_time.environment()
    available = available_formats()
    for scheme in [scheme for scheme in schemes if scheme.name not in available]:
        needs = "FlashInfer, with nvcc or the package flashinfer-cubin"
        if not scheme.runs_on(capability):
            needs = f"a GPU of compute capability {'.'.join(map(str, scheme.lowest_gpu))} or higher"
        raise ValueError(
            f"{scheme.label} rollouts need {needs}: choose another rollout_quantization "
            f"(--scheme). Here vLLM has kernels for {', '.join(available) or 'no format'}."
        )
    faults = [each.kernel_fault for each in SCHEMES.values()]
    here = [fault for fault in faults if fault is not None and capability >= fault.lowest]
    if not here or DISABLED_KERNELS_VARIABLE in os.environ:
        return {}
    return {
        DISABLED_KERNELS_VARIABLE: ",".join(kernel for fault in here for kernel in fault.kernels)
    }


def check_cpu_build(
    config: Any, schemes: Mapping[str, QuantizationScheme] | None = None, arguments: Any = None
) -> None:
    """Raise `ValueError` if vLLM runs on a CPU and its build for CPUs does not support a model with
    these formats.

    vLLM would fail minutes later, in other words, or abort the process. `schemes` are those of its
    layers, or any keys while these are not known; `arguments` are the engine's, by vLLM's names.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and (
        obstacle := next(_cpu_obstacles(config, schemes or {}, arguments or {}), None)
    ):
        raise ValueError(f"{obstacle}, or use a GPU.")


def expert_obstacle(config: Any, schemes: Mapping[str, QuantizationScheme]) -> str | None:
    """Return why an engine on this machine cannot run quantized experts, if there are any and it
    cannot.
    """
    from vllm.platforms import current_platform

    return _expert_obstacle(config, schemes) if current_platform.is_cpu() else None


def saturates() -> bool:
    """Return whether vLLM's INT8 kernels add products in 16 bits, which saturate: on x86 CPUs
    without VNNI.
    """
    cpu = torch.cpu.get_capabilities()
    return bool(cpu.get("avx2")) and not any(map(cpu.get, ("avx512_vnni", "avx_vnni", "amx_int8")))


def _cpu_obstacles(
    config: Any, schemes: Mapping[str, QuantizationScheme], arguments: Mapping
) -> Iterator[str]:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    text, has_amx = config.get_text_config(), bool(torch.cpu.get_capabilities().get("amx_tile"))
    heads, sizes = (
        getattr(text, "num_attention_heads", None),
        CPUAttentionBackend.get_supported_head_sizes(),
    )
    width = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else None)
    if width and width not in sizes:  # as in most tiny test models
        yield (
            f"The attention heads of this model are {width} wide, but vLLM's CPU build has kernels "
            f"only for {', '.join(map(str, sizes))}. Use a model with such heads (`make demo` "
            "trains one)"
        )
    if text.model_type == "gpt_oss":
        yield (
            "No sync can load the experts of gpt-oss into vLLM's CPU build, in any format: use "
            "another model"
        )
    if "enable_lora" in arguments and any(getattr(text, name, None) for name in EXPERT_COUNTS):
        yield (
            "vLLM's CPU build runs no adapter beside experts: merge it (weight_sync='auto', no "
            "--enable-lora)"
        )
    for scheme in dict.fromkeys(schemes.values()):
        if not scheme.runs_on(None) and (
            scheme.cpus or scheme.checkpoint_format == "pack-quantized"
        ):
            lacks = (
                f"kernels only for CPUs with {scheme.cpus}, which this one lacks"
                if scheme.cpus
                else "no kernels"
            )
            yield (
                f"For {scheme.label}, vLLM's CPU build has {lacks}: choose another "
                "rollout_quantization"
            )
    if has_amx and "int-quantized" in {scheme.checkpoint_format for scheme in schemes.values()}:
        kernels = "vLLM's INT8 kernels for CPUs with AMX"
        # "auto" runs a float32 model in bfloat16
        dtype = str(arguments.get("dtype", "auto")).removeprefix("torch.")
        dtype = (
            "float16" if dtype == "auto" and torch.float16 in (config.dtype, text.dtype) else dtype
        )
        if dtype not in ("auto", "bfloat16"):
            yield (
                f"{kernels} need dtype='bfloat16', not {dtype!r}: set it in vllm_engine_kwargs (or "
                "--dtype)"
            )
        if (names := arguments.get("architectures", config.architectures)) and transformers_backend(
            names, arguments
        ):
            yield (
                f"{kernels} cannot run its transformers backend: set rollout_quantization=None "
                "(--scheme none)"
            )
    if obstacle := _expert_obstacle(config, schemes):
        way_out = (
            f"add {EXPERTS!r} to quantization_ignore (or --ignore), which leaves experts in 16 bits"
        )
        yield f"{obstacle}: {way_out}"


def _expert_obstacle(config: Any, schemes: Mapping[str, QuantizationScheme]) -> str | None:
    """Return why vLLM's CPU build cannot run quantized experts of this model, if there are any."""
    experts = expert_layers(schemes)
    if not experts:
        return None
    text, has_amx = config.get_text_config(), bool(torch.cpu.get_capabilities().get("amx_tile"))
    inner = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", 0)
    needs = {
        "on CPUs with AMX, which this CPU lacks": has_amx,
        f"of {', '.join(ROUTED_BY_SOFTMAX)}, not of {text.model_type}": text.model_type
        in ROUTED_BY_SOFTMAX,
        f"with multiples of 32 as sizes, not {text.hidden_size} and {inner}": (
            text.hidden_size | inner
        )
        % 32
        == 0,
    }
    need = next((need for need, is_met in needs.items() if not is_met), None)
    return need and f"vLLM's CPU build runs {schemes[experts[0]].label} experts only {need}"


def transformers_backend(
    architectures: Collection[str], arguments: Mapping[str, Any]
) -> dict[str, type]:
    """Return vLLM's classes that run transformers' code of a model, by their names; none if vLLM
    has its own code.
    """
    from vllm.model_executor.models import ModelRegistry

    native = [
        n
        for n in architectures
        if n in ModelRegistry.models and arguments.get("model_impl") != "transformers"
    ]
    classes = {name: ModelRegistry.models[name].load_model_cls() for name in native or BACKENDS}
    return {
        name: cls
        for name, cls in classes.items()
        if BACKEND_MODULE in {each.__module__ for each in cls.__mro__}
    }
