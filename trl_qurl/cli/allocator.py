"""Makes glibc keep freed memory in processes that train or generate on a CPU, to save page faults in every step.

A step allocates and frees gigabytes. By default, glibc returns every freed block above 32 MB to the system, and pays a
page fault for every 4 KB when it needs the memory again. Our commands, notebooks and tests call this on startup;
importing the package changes nothing. User settings and other allocators take precedence.
"""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
LARGEST = 2**31 - 1  # maximum that mallopt accepts

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(LARGEST), "MALLOC_TRIM_THRESHOLD_": str(LARGEST)}
"""The same setting for child processes; glibc reads it only when a process starts."""

USER_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
TUNABLES = ("glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold", "glibc.malloc.mmap_max")
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # drivers of NVIDIA, AMD and WSL


def keep_freed_memory() -> bool:
    """Make glibc's malloc keep freed memory in this process and its children, unless the user has configured it.

    Memory stays bounded by the process's peak, because freed memory is reused.

    Returns:
        True if malloc keeps freed memory now.
    """
    if _obstacle() is not None:
        return False
    if os.environ.items() >= ENVIRONMENT.items():
        return True
    libc = ctypes.CDLL(None)
    # Older versions of glibc reject this threshold and change nothing.
    if not (libc.mallopt(M_MMAP_THRESHOLD, LARGEST) and libc.mallopt(M_TRIM_THRESHOLD, LARGEST)):
        return False
    os.environ.update(ENVIRONMENT)
    return True


def describe_allocator() -> str:
    """Describe in one line, for a report, what malloc does with freed memory in this process."""
    if (obstacle := _obstacle()) is not None:
        return f"malloc is left as it is: {obstacle}"
    return f"malloc {'keeps' if os.environ.items() >= ENVIRONMENT.items() else 'returns'} freed memory (glibc)"


def _obstacle() -> str | None:
    """Return why malloc must be left as it is, or `None`."""
    try:
        os.confstr("CS_GNU_LIBC_VERSION")
        glibc = ctypes.CDLL("libc.so.6")
    except (OSError, ValueError):
        return "the C library is not glibc"
    if _address(glibc.malloc) != _address(ctypes.CDLL(None).malloc):
        return "another allocator is loaded"
    for name in USER_VARIABLES:
        if os.environ.get(name, ENVIRONMENT.get(name)) != ENVIRONMENT.get(name):
            return f"{name} is set"
    if any(name in os.environ.get("GLIBC_TUNABLES", "") for name in TUNABLES):
        return "GLIBC_TUNABLES is set"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1") and any(map(os.path.exists, GPU_FILES)):
        return "there is a GPU"
    return None


def _address(function: object) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
