"""The lines of a report: their names, what each shows, and what a check says about it.

The documentation refers to lines by these names, and `trl-qurl doctor --only NAME` runs one of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

FORMAT = "FORMAT"
"""Stands for the name of a format in names of lines: there is one such line per format."""

LINES = {
    "python": "version of trl-qurl, Python and the system",
    "packages": "versions of the packages, and whether they are those that trl-qurl asks for",
    "driver": "NVIDIA's driver, and whether it can run the CUDA that torch was built for",
    "vllm": "whether vLLM is installed, for this device, and for the installed torch",
    "cpu": "the processor, and whether it multiplies bfloat16",
    "memory": "free memory, also of a container's limit",
    "allocator": "whether malloc keeps freed memory, which decides half of a step's time on a CPU",
    "threads": "settings of threads against the cores",
    "shm": "free space in /dev/shm",
    "ports": "whether the ports of servers and launchers are free",
    "variables": "environment variables that change what runs",
    "torch": "whether torch can be imported and sees the GPUs",
    "gpus": "each GPU with its memory and compute capability",
    "formats": "the formats that vLLM has kernels for here",
    "division": "whether the GPU rounds weights to the same bits as the CPU, in every format",
    f"engine-{FORMAT}": "a tiny engine starts in this format; with which kernels",
    f"train-{FORMAT}": "three training steps, digests of all tensors at each sync",
    f"probe-{FORMAT}": "how far the engine is from the trainer's own quantized forward pass, after each sync",
    "padded": "the same for layers that kernels and vocabulary must pad",
    "graphs": "the same with CUDA graphs and compilation",
    "sleep": "the same with an engine that sleeps between rollouts",
    "kv-cache": "the same with an FP8 key-value cache",
    "server": "training with `trl-qurl serve`, weights by files",
}
"""What each line shows, by name, in the order of the report."""


class Status(StrEnum):
    """What came of a check."""

    OK = "ok"
    NOTE = "note"  # it works, and there is something to know or to improve
    FAILED = "failed"  # something that is needed does not work
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Line:
    """What one check found."""

    name: str
    status: Status
    text: str  # one sentence
    advice: str = ""  # what to do, if there is something to do
    data: dict[str, Any] = field(default_factory=dict)  # figures, for --json


def ok(name: str, text: str, **data: Any) -> Line:
    """It works."""
    return Line(name, Status.OK, text, data=data)


def note(name: str, text: str, advice: str = "", **data: Any) -> Line:
    """It works, and there is something to know."""
    return Line(name, Status.NOTE, text, advice, data)


def failed(name: str, text: str, advice: str = "", **data: Any) -> Line:
    """Something that is needed does not work."""
    return Line(name, Status.FAILED, text, advice, data)


def skipped(name: str, reason: str) -> Line:
    """It was not tried."""
    return Line(name, Status.SKIPPED, reason)


def is_known(name: str) -> bool:
    """Whether there is a line of this name, or lines of one format are called so."""
    start, _, form = name.partition("-")
    return name in LINES or bool(form) and f"{start}-{FORMAT}" in LINES
