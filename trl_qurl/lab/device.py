"""What this machine's device decides: the 16-bit type, and settings where TRL's defaults stop with an error."""

from __future__ import annotations

BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")
"""torch's names of the instructions that multiply bfloat16 (x86, x86, ARM). Without them bfloat16 is emulated."""


def cpu_settings() -> dict[str, bool]:
    """`use_cpu` and `bf16` for a machine without an accelerator; nothing where there is one."""
    import torch

    if torch.accelerator.is_available():
        return {}
    capabilities = torch.cpu.get_capabilities()
    return {"use_cpu": True, "bf16": any(capabilities.get(name) for name in BF16_INSTRUCTIONS)}


def full_precision() -> tuple[str, str]:
    """The 16-bit format of this machine, as shown and as vLLM and torch call it.

    Not vLLM's own choice, which would be FP16 for the float32 weights that training saves.
    """
    import torch

    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):  # Turing
        return "FP16", "float16"
    return "BF16", "bfloat16"
