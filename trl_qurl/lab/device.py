"""Settings that depend on this machine: its 16-bit type, and TRL defaults that fail on a CPU."""

from __future__ import annotations

import ctypes
import os
import platform
import sys

BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")
"""Torch's names of instructions that multiply bfloat16 (x86, x86, ARM).

Without them, bfloat16 is emulated.
"""


def cpu_settings() -> dict[str, bool]:
    """Return `use_cpu` and `bf16` for a machine without an accelerator; empty if there is one."""
    import torch

    if torch.accelerator.is_available():
        return {}
    capabilities = torch.cpu.get_capabilities()
    return {"use_cpu": True, "bf16": any(capabilities.get(name) for name in BF16_INSTRUCTIONS)}


def keep_freed_memory() -> None:
    """Make glibc keep freed memory on a CPU, unless a `MALLOC_` variable is set.

    A step allocates and frees gigabytes. By default, glibc returns large blocks to the system, and
    pays a page fault for every 4 KB when it needs them again: an update of SmolLM2-135M took 3.0 s
    instead of 2.3 s.
    """
    import torch

    is_set = any(name.startswith("MALLOC_") for name in os.environ)
    if not is_set and platform.libc_ver()[0] == "glibc" and not torch.accelerator.is_available():
        trim_threshold = -1  # numbers of malloc.h
        mmap_threshold = -3
        largest = 2**31 - 1
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, largest)
        libc.mallopt(trim_threshold, largest)


def full_precision() -> tuple[str, str]:
    """Return the display name of this machine's 16-bit format, and its name in vLLM and torch.

    We do not leave the choice to vLLM: for float32 weights it would choose FP16.
    """
    from trl_qurl.quantization.formats import emulates_bfloat16

    if emulates_bfloat16():
        return "FP16", "float16"  # as on Turing
    return "BF16", "bfloat16"


def use_one_gpu() -> None:
    """Hide all GPUs but the first from this process, unless a launcher started it.

    With several, Transformers would split each batch over them, which TRL refuses. Call it before
    anything uses CUDA, which reads the variable once.
    """
    if "LOCAL_RANK" in os.environ:  # set by torchrun and `accelerate launch`
        return
    import torch

    count = torch.cuda.device_count()  # of those visible; by NVML, without a start of CUDA
    if count < 2:
        return
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    os.environ["CUDA_VISIBLE_DEVICES"] = chosen
    print(
        f"Using GPU {chosen}, one of {count} (CUDA_VISIBLE_DEVICES chooses another). To train on "
        "several: docs/scaling.md",
        file=sys.stderr,
    )
