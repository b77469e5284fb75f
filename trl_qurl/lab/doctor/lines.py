"""The lines of a report: their names, descriptions and results.

The documentation refers to lines by these names, and `trl-qurl doctor --only NAME` runs a single one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

FORMAT = "FORMAT"
"""Placeholder for a format in line names; such a line exists once per format."""

LINES = {
    "python": "version of trl-qurl, Python and the system",
    "packages": "package versions, and whether they meet trl-qurl's requirements",
    "driver": "NVIDIA's driver, and whether it can run the CUDA version that torch was built for",
    "vllm": "whether vLLM is installed, and built for this device and the installed torch",
    "cpu": "the processor, and whether it multiplies bfloat16",
    "memory": "free memory, within a container's limit",
    "allocator": "whether malloc keeps freed memory, which accounts for half of a step's time on a CPU",
    "threads": "thread settings compared to the available cores",
    "shm": "free space in /dev/shm",
    "ports": "whether the ports of servers and launchers are free",
    "variables": "environment variables that affect a run",
    "torch": "whether torch can be imported and sees the GPUs",
    "gpus": "each GPU with its memory and compute capability",
    "formats": "the formats that vLLM has kernels for here",
    "division": "whether the GPU rounds weights to the same bits as the CPU, in every format",
    f"engine-{FORMAT}": "whether a tiny engine starts in this format, and with which kernels",
    f"train-{FORMAT}": "three training steps, with digests of all tensors at each sync",
    f"probe-{FORMAT}": "distance between the engine and the trainer's quantized forward pass, after each sync",
    "padded": "the same with layers and a vocabulary that need padding",
    "graphs": "the same with CUDA graphs and compilation",
    "sleep": "the same with an engine that sleeps between rollouts",
    "kv-cache": "the same with an FP8 key-value cache",
    "server": "training with `trl-qurl serve`, sending weights as files",
}
"""Description of each line by name, in report order."""


class Status(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    NOTE = "note"  # works, but there is something to know or to improve
    FAILED = "failed"  # something required does not work
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Line:
    """Result of one check."""

    name: str
    status: Status
    text: str  # one sentence
    advice: str = ""  # how to fix or improve it, if applicable
    data: dict[str, Any] = field(default_factory=dict)  # values for --json


def ok(name: str, text: str, **data: Any) -> Line:
    """Build a line for something that works."""
    return Line(name, Status.OK, text, data=data)


def note(name: str, text: str, advice: str = "", **data: Any) -> Line:
    """Build a line for something that works, with a remark."""
    return Line(name, Status.NOTE, text, advice, data)


def failed(name: str, text: str, advice: str = "", **data: Any) -> Line:
    """Build a line for something required that does not work."""
    return Line(name, Status.FAILED, text, advice, data)


def skipped(name: str, reason: str) -> Line:
    """Build a line for a skipped check."""
    return Line(name, Status.SKIPPED, reason)


def is_known(name: str) -> bool:
    """Check whether a line of this name exists, including the lines of a format."""
    start, _, form = name.partition("-")
    return name in LINES or bool(form) and f"{start}-{FORMAT}" in LINES
