"""What to do about messages of the libraries below, which name the fault but not the remedy."""

from __future__ import annotations

import re

KNOWN = {
    r"undefined symbol|libcudart|libtorch\S* cannot open|libc10": "vLLM and torch were built for each other's other "
    "versions: install both together (docs/installation.md).",
    r"driver on your system is too old|driver version is insufficient": "Update the NVIDIA driver, or install builds "
    "for an older CUDA (docs/installation.md).",
    r"out of memory|No available memory for the cache|Free memory on device": "Another process may use the device "
    "(nvidia-smi, or free): end it and run this again.",
    r"no kernel image is available|unsupported toolchain": "The installed builds have no code for this GPU: see "
    "docs/installation.md.",
    r"No space left on device|SIGBUS|Bus error": "Free space in /dev/shm and in the temporary directory; a container "
    "needs --shm-size=8g.",
    r"[Aa]ddress already in use|EADDRINUSE": "Another process has the port: end it, or see the line `ports`.",
    r"[Bb]float16 is only supported": "This GPU has no bfloat16: train with --bf16 false --fp16 true and "
    'vllm_engine_kwargs \'{"dtype": "float16"}\'.',
    r"[Ff]ailed to find a kernel": "vLLM has no kernel for this format here, or VLLM_DISABLED_KERNELS forbids it: see "
    "the lines `formats` and `variables`.",
}
"""Advice, by a pattern of the message that it is for."""


def advice_for(message: str, line: str) -> str:
    """What to do about this message of a line."""
    for pattern, advice in KNOWN.items():
        if re.search(pattern, message):
            return advice
    return (
        f"`TRL_QURL_DEBUG=1 trl-qurl doctor --only {line}` prints all that was said; docs/troubleshooting.md explains "
        "common messages. Otherwise open an issue with the output of `trl-qurl doctor --json`."
    )
