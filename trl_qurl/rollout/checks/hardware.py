"""Limits of vLLM on this machine: kernels that work on its GPU, layers on its CPU."""

import logging
import os
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from trl_qurl.quantization.checkpoint_form import expert_layers
from trl_qurl.quantization.formats import SCHEMES, gpu_capability
from trl_qurl.quantization.scheme import QuantizationScheme
from trl_qurl.rollout.repairs import ahead_of_time

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

DISABLED_KERNELS_VARIABLE = "VLLM_DISABLED_KERNELS"  # vLLM's: class names, separated by commas
# vLLM's model classes that run transformers' code, and their module.
BACKENDS = (
    "TransformersForCausalLM",
    "TransformersMoEForCausalLM",
    "TransformersMultiModalForCausalLM",
    "TransformersMultiModalMoEForCausalLM",
)
BACKEND_MODULE = "vllm.model_executor.models.transformers"
EXPERTS = r"re:.*\.experts\."  # pattern of all experts, for `quantization_ignore`
# `model_type`s with experts that vLLM's CPU build can run, read in its code.
ROUTED_BY_SOFTMAX = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Tokens on a CPU: SmolLM2-135M in INT8 gains 2 ms a token, and loses a minute first.
WORTH_COMPILING = 30_000

Schemes = Mapping[str, QuantizationScheme]


def check_hardware(
    config: "PreTrainedConfig", schemes: Schemes, arguments: Mapping[str, Any]
) -> None:
    """Check that vLLM can run a model here, and set the variables that its kernels need."""
    check_cpu_build(config, schemes, arguments)
    os.environ.update(kernel_environment(*dict.fromkeys(schemes.values())))


def available_formats() -> list[str]:
    """Return the formats that vLLM has kernels for on this machine."""
    capability = gpu_capability()
    return [name for name, scheme in SCHEMES.items() if scheme.runs_on(capability)]


def kernel_environment(*schemes: QuantizationScheme) -> dict[str, str]:
    """Return the environment that vLLM needs before an engine of these formats starts.

    It leaves out what the user has set. On a CPU, it logs a warning if INT8 is inexact there. On a
    GPU, it is the same for all formats, because vLLM reads it once per process. Raises `ValueError`
    if none of vLLM's kernels for a format works on this GPU: with a weight-only kernel, activations
    would stay exact.
    """
    capability = gpu_capability()
    if capability is None:
        _warn_if_inexact(schemes)
        return ahead_of_time.environment()
    _check_kernels(schemes, capability)
    disabled: list[str] = []
    for scheme in SCHEMES.values():
        fault = scheme.kernel_fault
        if fault is not None and capability >= fault.lowest:
            disabled += fault.kernels
    if not disabled or DISABLED_KERNELS_VARIABLE in os.environ:
        return {}
    return {DISABLED_KERNELS_VARIABLE: ",".join(disabled)}


def _warn_if_inexact(schemes: Collection[QuantizationScheme]) -> None:
    has_int8 = any(scheme.checkpoint_format == "int-quantized" for scheme in schemes)
    if has_int8 and saturates():
        logger.warning(
            "This CPU has no VNNI, so vLLM's INT8 sums saturate, and the actor is rougher. Good "
            "for a trial. Exact: rollout_quantization=None, vllm_engine_kwargs={'dtype': "
            "'float32'}."
        )


def _check_kernels(schemes: Collection[QuantizationScheme], capability: tuple[int, int]) -> None:
    available = available_formats()
    for scheme in schemes:
        if scheme.name in available:
            continue
        lowest = ".".join(map(str, scheme.lowest_gpu))
        raise ValueError(
            f"{scheme.label} rollouts need a GPU of compute capability {lowest} or higher: choose "
            f"another rollout_quantization (--scheme). "
            f"Here vLLM has kernels for {', '.join(available) or 'no format'}."
        )


def saturates() -> bool:
    """Return whether vLLM's INT8 kernels add products in 16 bits, which saturate.

    They do on x86 CPUs without VNNI.
    """
    cpu = torch.cpu.get_capabilities()
    has_vnni = cpu.get("avx512_vnni") or cpu.get("avx_vnni") or cpu.get("amx_int8")
    return bool(cpu.get("avx2") and not has_vnni)


def transformers_backend(
    architectures: Collection[str], arguments: Mapping[str, Any]
) -> dict[str, type]:
    """Return vLLM's classes that run transformers' code of a model, by their names.

    There are none if vLLM has its own code.
    """
    from vllm.model_executor.models import ModelRegistry

    native = []
    if arguments.get("model_impl") != "transformers":
        native = [name for name in architectures if name in ModelRegistry.models]
    found = {}
    for name in native or BACKENDS:
        loaded = ModelRegistry.models[name].load_model_cls()
        if any(each.__module__ == BACKEND_MODULE for each in loaded.__mro__):
            found[name] = loaded
    return found


# What vLLM's build for CPUs cannot run


def check_cpu_build(
    config: "PreTrainedConfig",
    schemes: Schemes | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> None:
    """Raise `ValueError` if vLLM runs on a CPU and cannot run a model with these formats there.

    vLLM would fail minutes later, in other words, or abort the process. `schemes` are those of its
    layers, or any keys while these are not known; `arguments` are the engine's, by vLLM's names.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    obstacle = next(_cpu_obstacles(config, schemes or {}, arguments or {}), None)
    if obstacle is not None:
        raise ValueError(f"{obstacle}, or use a GPU.")


def expert_obstacle(config: "PreTrainedConfig", schemes: Schemes) -> str | None:
    """Return why an engine on this machine cannot run quantized experts, or `None`."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    return _expert_obstacle(config, schemes)


def _cpu_obstacles(
    config: "PreTrainedConfig", schemes: Schemes, arguments: Mapping[str, Any]
) -> Iterator[str]:
    text = config.get_text_config()
    yield from _head_obstacles(text)
    if text.model_type == "gpt_oss":
        yield (
            "No sync can load the experts of gpt-oss into vLLM's CPU build, in any format: use "
            "another model"
        )
    has_experts = any(getattr(text, name, None) for name in EXPERT_COUNTS)
    if has_experts and "enable_lora" in arguments:
        yield (
            "vLLM's CPU build runs no adapter beside experts: merge it (weight_sync='auto', no "
            "--enable-lora)"
        )
    for scheme in dict.fromkeys(schemes.values()):
        yield from _format_obstacles(scheme)
    has_int8 = any(scheme.checkpoint_format == "int-quantized" for scheme in schemes.values())
    if has_int8 and _has_amx():
        yield from _amx_obstacles(config, arguments)
    obstacle = _expert_obstacle(config, schemes)
    if obstacle is not None:
        yield (
            f"{obstacle}: add {EXPERTS!r} to quantization_ignore (or --ignore), which leaves "
            "experts in 16 bits"
        )


def _head_obstacles(text: "PreTrainedConfig") -> Iterator[str]:
    """Yield why attention heads have no kernel, as those of most tiny test models."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    heads = getattr(text, "num_attention_heads", None)
    width = getattr(text, "head_dim", None)
    if not width and heads:
        width = text.hidden_size // heads
    if width and width not in sizes:
        yield (
            f"The attention heads of this model are {width} wide, but vLLM's CPU build has kernels "
            f"only for {', '.join(map(str, sizes))}. Use a model with such heads (`make demo` "
            "trains one)"
        )


def _format_obstacles(scheme: QuantizationScheme) -> Iterator[str]:
    if scheme.runs_on(None):
        return
    if scheme.cpus:
        lacks = f"kernels only for CPUs with {scheme.cpus}, which this one lacks"
    elif scheme.checkpoint_format == "pack-quantized":
        lacks = "no kernels"
    else:
        return
    yield f"For {scheme.label}, vLLM's CPU build has {lacks}: choose another rollout_quantization"


def _amx_obstacles(config: "PreTrainedConfig", arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield why INT8 kernels for CPUs with AMX cannot run a model."""
    kernels = "vLLM's INT8 kernels for CPUs with AMX"
    dtype = str(arguments.get("dtype", "auto")).removeprefix("torch.")
    # "auto" runs a float32 model in bfloat16.
    if dtype == "auto" and torch.float16 in (config.dtype, config.get_text_config().dtype):
        dtype = "float16"
    if dtype not in ("auto", "bfloat16"):
        yield (
            f"{kernels} need dtype='bfloat16', not {dtype!r}: set it in vllm_engine_kwargs (or "
            "--dtype)"
        )
    architectures = arguments.get("architectures", config.architectures)
    if architectures and transformers_backend(architectures, arguments):
        yield (
            f"{kernels} cannot run its transformers backend: set rollout_quantization=None "
            "(--scheme none)"
        )


def _expert_obstacle(config: "PreTrainedConfig", schemes: Schemes) -> str | None:
    """Return why vLLM's CPU build cannot run quantized experts of this model, if there are any."""
    experts = expert_layers(schemes)
    if not experts:
        return None
    need = next(_needs_of_experts(config.get_text_config()), None)
    if need is None:
        return None
    return f"vLLM's CPU build runs {schemes[experts[0]].label} experts only {need}"


def _needs_of_experts(text: "PreTrainedConfig") -> Iterator[str]:
    """Yield what quantized experts need and do not have here."""
    if not _has_amx():
        yield "on CPUs with AMX, which this CPU lacks"
    if text.model_type not in ROUTED_BY_SOFTMAX:
        yield f"of {', '.join(ROUTED_BY_SOFTMAX)}, not of {text.model_type}"
    inner = getattr(text, "intermediate_size", 0)
    inner = getattr(text, "moe_intermediate_size", None) or inner
    if text.hidden_size % 32 or inner % 32:
        yield f"with multiples of 32 as sizes, not {text.hidden_size} and {inner}"


def _has_amx() -> bool:
    return bool(torch.cpu.get_capabilities().get("amx_tile"))
