"""Settings that depend on this machine's device: the 16-bit type, and fixes for TRL defaults that fail on a CPU."""

from __future__ import annotations

BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")
"""Torch's names of instructions that multiply bfloat16 (x86, x86, ARM). Without them, bfloat16 is emulated."""


def cpu_settings() -> dict[str, bool]:
    """Return `use_cpu` and `bf16` for a machine without an accelerator; empty if there is one."""
    import torch

    if torch.accelerator.is_available():
        return {}
    capabilities = torch.cpu.get_capabilities()
    return {"use_cpu": True, "bf16": any(capabilities.get(name) for name in BF16_INSTRUCTIONS)}


def full_precision() -> tuple[str, str]:
    """Return the display name of this machine's 16-bit format, and its name in vLLM and torch.

    We do not leave the choice to vLLM: for float32 weights, which training saves, it would choose FP16.
    """
    import torch

    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):  # Turing
        return "FP16", "float16"
    return "BF16", "bfloat16"
