"""Checks that ask torch: which devices it has, or why none, and the formats that vLLM can run."""

from __future__ import annotations

import importlib.util
import logging
import shutil
from logging.handlers import BufferingHandler

import torch

from trl_qurl.lab.comparison import candidates
from trl_qurl.lab.device import BF16_INSTRUCTIONS, full_precision
from trl_qurl.lab.doctor.environment import GIB, driver_version
from trl_qurl.lab.doctor.report import Line, Status
from trl_qurl.quantization.formats import SCHEMES, UNQUANTIZED
from trl_qurl.rollout.checks.hardware import saturates

OLDEST_DRIVERS = {13: 580, 12: 525}
"""Minimum NVIDIA driver by major CUDA version, from NVIDIA's page on minor version compatibility.

docs/installation.md has the same table.
"""


def check() -> list[Line]:
    """Report torch with its devices, and the formats with kernels."""
    return [check_torch(torch.version.cuda, driver_version()), check_formats()]


def check_torch(cuda: str | None, driver: str | None) -> Line:
    """Describe the devices that torch sees, or explain why it sees no GPU.

    Args:
        cuda: CUDA version of torch's build; `None` without CUDA.
        driver: Version of NVIDIA's driver; `None` if it is missing or does not respond.
    """
    built = f"torch {torch.__version__} {f'for CUDA {cuda}' if cuda else 'without CUDA'}"
    if torch.cuda.is_available():
        return describe_gpus(built)
    if driver is not None:
        text = f"{built} sees no GPU, although NVIDIA driver {driver} responds."
        return Line("torch", text, Status.FAILED, _advice_for_driver(cuda, driver))
    if shutil.which("nvidia-smi"):
        advice = "Reinstall the NVIDIA driver, or reboot."
        return Line("torch", "nvidia-smi does not respond.", Status.FAILED, advice)
    if cuda:
        text = f"{built}, but this machine has no NVIDIA driver."
        advice = "If this machine has a GPU, install its driver (docs/installation.md)."
        return Line("torch", text, Status.NOTE, advice)
    return describe_cpu(built)


def _advice_for_driver(cuda: str | None, driver: str) -> str:
    """Say what to do if torch, built for this CUDA, sees no GPU with this driver."""
    if cuda is None:
        return (
            "Install torch for CUDA (docs/installation.md), or run `make setup PROFILE=gpu` in a "
            "clone."
        )
    major = int(driver.partition(".")[0])
    needed = OLDEST_DRIVERS.get(int(cuda.partition(".")[0]), 0)
    if major >= needed:
        return "Check CUDA_VISIBLE_DEVICES, and the container's GPU access (--gpus all)."
    alternative = "; no current vLLM build supports it"
    supported = [version for version, oldest in OLDEST_DRIVERS.items() if major >= oldest]
    if supported:
        alternative = f", or install builds for CUDA {supported[0]}"
    return f"Update the driver to {needed} or newer{alternative} (docs/installation.md)."


def describe_gpus(built: str) -> Line:
    """Describe each GPU."""
    descriptions = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        descriptions.append(
            f"{device.name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free, compute capability "
            f"{device.major}.{device.minor}"
        )
    text = f"{built}, NVIDIA driver {driver_version()}; {'; '.join(descriptions)}"
    status = Status.OK
    advice = ""
    if full_precision()[1] == "float16":
        status = Status.NOTE
        advice = (
            "No bfloat16: trainer and engine use float16, unless you set another type "
            "(docs/installation.md)."
        )
    return Line("torch", text, status, advice, {"gpus": len(descriptions)})


def describe_cpu(built: str) -> Line:
    """Describe the processor, on which everything runs."""
    cpu = torch.cpu.get_capabilities()
    count = torch.get_num_threads()
    threads = "1 thread" if count == 1 else f"{count} threads"
    processor = f"{cpu['cpu_name']}, {threads}"
    text = f"{built}, no NVIDIA driver: everything runs on the CPU ({processor})"
    status = Status.OK
    advice = ""
    if not any(cpu.get(name) for name in BF16_INSTRUCTIONS):
        status = Status.NOTE
        advice = (
            "This CPU emulates bfloat16, in 16-bit rollouts and in bf16 training: train in float32 "
            "(--bf16 false)."
        )
        if saturates():
            advice += (
                " And vLLM's INT8 sums saturate here, because there is no VNNI: good for a trial "
                "only."
            )
    return Line("torch", text, status, advice)


def check_formats() -> Line:
    """List the formats with vLLM kernels on this machine, and what the others need."""
    fault = load_kernels()
    if fault:
        advice = (
            "If it names a library that is missing, install that (libnuma: `apt-get install "
            "libnuma1`); otherwise install vLLM and torch together (docs/installation.md)."
        )
        return Line("formats", f"vLLM cannot load its kernels: {fault}", Status.FAILED, advice)
    here = [*candidates(None), UNQUANTIZED]
    text = f"vLLM has kernels for {', '.join(here)} (16 bits) here"
    others = []
    for name, scheme in SCHEMES.items():
        if name not in here:
            major, minor = scheme.lowest_gpu
            others.append(f"{name} {major}.{minor}")
    if others:
        text += f". Lowest compute capability for the others: {', '.join(others)}"
    return Line("formats", text, data={"formats": here})


def load_kernels() -> str:
    """Load vLLM's compiled kernels, and return what vLLM says if it cannot.

    It only logs that, and fails when an engine calls the first one.
    """
    if importlib.util.find_spec("vllm") is None:
        return ""  # the line `vllm` says so
    from vllm.platforms import current_platform

    log = BufferingHandler(capacity=100)
    logger = logging.getLogger("vllm.platforms")
    logger.setLevel(logging.WARNING)
    logger.addHandler(log)
    current_platform.import_kernels()
    return "; ".join(record.getMessage() for record in log.buffer)
