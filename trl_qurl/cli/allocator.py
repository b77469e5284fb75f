"""Lets glibc keep freed memory in processes that train or generate on a CPU, which saves the page faults of a step.

A step allocates and frees gigabytes. By default glibc returns every freed block above 32 MB to the system, and pays a
page fault for every 4 KB when it asks for it again. Our commands, notebooks and tests call this at their start;
importing the package changes nothing. The user's settings and another allocator take precedence.
"""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGEST = 2**31 - 1  # that mallopt takes

KEPT = {"MALLOC_MMAP_THRESHOLD_": str(LARGEST), "MALLOC_TRIM_THRESHOLD_": str(LARGEST)}
"""The same for child processes; glibc reads it only when a process starts."""

OF_THE_USER = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
TUNABLES = ("glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold", "glibc.malloc.mmap_max")
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # drivers of NVIDIA and AMD, and WSL's


def keep_freed_memory() -> bool:
    """Let malloc keep freed memory, in this process and its children, if it is glibc's and the user has not set it.

    Memory stays bounded by the process's own peak: what is freed is used again.

    Returns:
        Whether it does now.
    """
    if _obstacle() is not None:
        return False
    if os.environ.items() >= KEPT.items():
        return True
    libc = ctypes.CDLL(None)
    # An older glibc refuses such a threshold and leaves the process as it was.
    if not (libc.mallopt(M_MMAP_THRESHOLD, LARGEST) and libc.mallopt(M_TRIM_THRESHOLD, LARGEST)):
        return False
    os.environ.update(KEPT)
    return True


def describe_allocator() -> str:
    """What malloc does with freed memory in this process, in one line for a report."""
    if (obstacle := _obstacle()) is not None:
        return f"malloc is left as it is: {obstacle}"
    return f"malloc {'keeps' if os.environ.items() >= KEPT.items() else 'returns'} freed memory (glibc)"


def _obstacle() -> str | None:
    """Why malloc is left as it is, or `None`."""
    try:
        os.confstr("CS_GNU_LIBC_VERSION")
        glibc = ctypes.CDLL("libc.so.6")
    except (OSError, ValueError):
        return "the C library is not glibc"
    if _address(glibc.malloc) != _address(ctypes.CDLL(None).malloc):
        return "another allocator is loaded"
    for name in OF_THE_USER:
        if os.environ.get(name, KEPT.get(name)) != KEPT.get(name):
            return f"{name} is set"
    if any(name in os.environ.get("GLIBC_TUNABLES", "") for name in TUNABLES):
        return "GLIBC_TUNABLES is set"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1") and any(map(os.path.exists, GPU_FILES)):
        return "there is a GPU"
    return None


def _address(function: object) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
