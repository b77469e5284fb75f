"""Advice on errors from the underlying libraries, whose messages name the problem but not the fix."""

from __future__ import annotations

import re

ADVICE = {
    r"undefined symbol|libcudart|libtorch\S* cannot open|libc10": "The installed vLLM and torch builds do not match: "
    "install both together (docs/installation.md).",
    r"driver on your system is too old|driver version is insufficient": "Update the NVIDIA driver, or install builds "
    "for an older CUDA (docs/installation.md).",
    r"out of memory|No available memory for the cache|Free memory on device": "Another process may be using the "
    "memory (check nvidia-smi or free): stop it and try again.",
    r"no kernel image is available|unsupported toolchain": "The installed builds do not support this GPU: see "
    "docs/installation.md.",
    r"No space left on device|SIGBUS|Bus error": "Free up space in /dev/shm and in the temporary directory; start "
    "containers with --shm-size=8g.",
    r"[Aa]ddress already in use|EADDRINUSE": "Another process is using the port: stop it, or see the line `ports`.",
    r"[Bb]float16 is only supported": "This GPU does not support bfloat16: train with --bf16 false --fp16 true and "
    'vllm_engine_kwargs \'{"dtype": "float16"}\'.',
    r"[Ff]ailed to find a kernel": "vLLM has no kernel for this format here, or VLLM_DISABLED_KERNELS disables it: "
    "see the lines `formats` and `variables`.",
}
"""Advice by pattern of the error message."""


def advice_for(message: str, line: str) -> str:
    """Return advice on an error message of a line."""
    for pattern, advice in ADVICE.items():
        if re.search(pattern, message):
            return advice
    return (
        f"Run `TRL_QURL_DEBUG=1 trl-qurl doctor --only {line}` for the full output. docs/troubleshooting.md explains "
        "common messages. If it does not help, open an issue with the output of `trl-qurl doctor --json`."
    )
