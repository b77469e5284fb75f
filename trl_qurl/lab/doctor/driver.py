"""NVIDIA's driver, and the CUDA builds it can run. Avoids torch, whose import fails with some old drivers."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from trl_qurl.lab.doctor.lines import Line, failed, note, ok

OLDEST_DRIVERS = {13: 580, 12: 525}
"""Minimum NVIDIA driver by major CUDA version, from NVIDIA's page on minor version compatibility.
docs/installation.md has the same table."""

COMPATIBILITY = "VLLM_ENABLE_CUDA_COMPATIBILITY"
"""Variable that makes vLLM's Docker image use NVIDIA's compatibility libraries for older drivers."""


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
    return version if done.returncode == 0 and re.fullmatch(r"\d+(\.\d+)*", version) else None


def cuda_of_torch() -> str | None:
    """Return the CUDA version of the torch build; `None` without CUDA or torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    match = re.search(r"^cuda\b[^=]*= '([\d.]+)'", Path(spec.origin).with_name("version.py").read_text(), re.MULTILINE)
    return match and match[1]


def check_driver() -> Line:
    """Check that the driver can run the CUDA version that torch was built for."""
    return judge_driver(driver_version(), cuda_of_torch())


def judge_driver(driver: str | None, cuda: str | None) -> Line:
    """Build the line for a driver and torch's CUDA version, either of which may be missing."""
    data = {"driver": driver, "cuda": cuda}
    if driver is None:
        if shutil.which("nvidia-smi") is not None:
            return failed("driver", "nvidia-smi does not respond.", "Reinstall the NVIDIA driver, or reboot.", **data)
        if cuda is None:
            return ok("driver", "no NVIDIA driver, and torch without CUDA: everything runs on the CPU", **data)
        advice = "If this machine has a GPU, install its driver (docs/installation.md)."
        return note("driver", f"no NVIDIA driver, although torch is built for CUDA {cuda}.", advice, **data)
    if cuda is None:
        return failed(
            "driver",
            f"NVIDIA driver {driver}, but torch is built without CUDA, so the GPU would not be used.",
            "Install torch for CUDA (docs/installation.md), or run `make setup PROFILE=gpu` in a clone.",
            **data,
        )
    major, oldest = int(driver.partition(".")[0]), OLDEST_DRIVERS.get(int(cuda.partition(".")[0]))
    if oldest is None or major >= oldest:
        return ok("driver", f"NVIDIA driver {driver} runs builds for CUDA {cuda}", **data)
    text = (
        f"torch is built for CUDA {cuda}, which needs NVIDIA driver {oldest} or newer, but this machine has {driver}."
    )
    if os.environ.get(COMPATIBILITY) == "1":
        return note("driver", text, f"{COMPATIBILITY}=1 may compensate for this: see the line `torch`.", **data)
    runs = next((cuda for cuda, oldest in OLDEST_DRIVERS.items() if major >= oldest), None)
    alternative = f", or install builds for CUDA {runs}" if runs else "; no current vLLM build supports it"
    return failed("driver", text, f"Update the driver{alternative} (docs/installation.md).", **data)
