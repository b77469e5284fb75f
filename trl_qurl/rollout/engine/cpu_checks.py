"""Refuse what vLLM's CPU build cannot run, or runs incorrectly, before an engine starts there."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from trl_qurl.quantization.checkpoint_form import expert_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from trl_qurl.quantization.scheme import QuantizationScheme


def check_cpu_build(
    config: "PretrainedConfig",
    layers: Collection[str] = (),
    scheme: "QuantizationScheme | None" = None,
    engine_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Raise `ValueError` for a model or an option that vLLM's CPU build does not support.

    Args:
        config: Configuration of the model. Tiny test models usually have attention heads that are too small; vLLM
            itself would fail minutes later, at the first token.
        layers: Names of the layers to quantize.
        scheme: Their format, if any.
        engine_kwargs: The user's arguments for the engine.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    text = config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if width not in sizes:
        raise ValueError(
            f"The attention heads of this model are {width} wide, but vLLM's CPU build has kernels only "
            f"for {', '.join(map(str, sizes))}. Use a model with such heads (`make demo` trains one), or a GPU."
        )
    if (engine_kwargs or {}).get("speculative_config"):
        # A kernel that spreads temperatures over draft tokens writes into a copy (`_expand_kernel_impl`).
        raise ValueError(
            "vllm_engine_kwargs sets 'speculative_config', but with it vLLM's CPU build samples at temperatures from "
            "uninitialized memory: remove it, or use a GPU."
        )
    if scheme and expert_layers(layers) and not _has_amx():
        raise ValueError(
            f"vLLM's CPU build runs {scheme.label} experts only on CPUs with AMX, which this CPU lacks: add "
            "'re:.*\\.experts\\.' to quantization_ignore (`--ignore` on the command line), which leaves experts in 16 "
            "bits and quantizes all other layers, or use a GPU."
        )


def check_cpu_backend(architectures: Collection[str], scheme: "QuantizationScheme | None") -> None:
    """Raise `ValueError` if vLLM's transformers backend, which runs these architectures, cannot run INT8 here."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and _has_amx() and scheme is not None and scheme.name == "int8":
        raise ValueError(
            f"vLLM runs {', '.join(architectures)} with its transformers backend. Its inputs have three dimensions, "
            "but vLLM's INT8 kernel for CPUs with AMX accepts only two: set rollout_quantization=None, or use a GPU."
        )


def _has_amx() -> bool:
    return bool(torch.cpu.get_capabilities().get("amx_tile"))
