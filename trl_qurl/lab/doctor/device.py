"""Checks that ask torch: the devices it sees or why not, and the
formats that vLLM can run on them.
"""

from __future__ import annotations

import shutil

import torch

from trl_qurl.lab.comparison import candidates
from trl_qurl.lab.device import BF16_INSTRUCTIONS, full_precision
from trl_qurl.lab.doctor.environment import GIB, driver_version
from trl_qurl.lab.doctor.report import Evidence, Line, Status
from trl_qurl.quantization.formats import SCHEMES, UNQUANTIZED
from trl_qurl.rollout.engine.hardware import saturates

OLDEST_DRIVERS = {13: 580, 12: 525}
"""Minimum NVIDIA driver by major CUDA version, from NVIDIA's page on minor version compatibility.
docs/installation.md has the same table."""


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
    if driver is None and shutil.which("nvidia-smi"):
        return Line(
            "torch",
            "nvidia-smi does not respond.",
            Status.FAILED,
            "Reinstall the NVIDIA driver, or reboot.",
        )
    if driver is None and cuda:
        advice = "If this machine has a GPU, install its driver (docs/installation.md)."
        return Line(
            "torch", f"{built}, but this machine has no NVIDIA driver.", Status.NOTE, advice
        )
    if driver is None:
        return describe_cpu(built)
    major, oldest = (
        int(driver.partition(".")[0]),
        OLDEST_DRIVERS.get(int((cuda or "0").partition(".")[0]), 0),
    )
    if cuda is None:
        advice = (
            "Install torch for CUDA (docs/installation.md), or run `make setup PROFILE=gpu` in a "
            "clone."
        )
    elif major >= oldest:
        advice = "Check CUDA_VISIBLE_DEVICES, and the container's GPU access (--gpus all)."
    else:
        runs = next((cuda for cuda, oldest in OLDEST_DRIVERS.items() if major >= oldest), None)
        alternative = (
            f", or install builds for CUDA {runs}"
            if runs
            else "; no current vLLM build supports it"
        )
        advice = f"Update the driver to {oldest} or newer{alternative} (docs/installation.md)."
    text = f"{built} sees no GPU, although NVIDIA driver {driver} responds."
    return Line("torch", text, Status.FAILED, advice)


def describe_gpus(built: str) -> Line:
    """Describe each GPU."""
    descriptions = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        free, total = (size / GIB for size in torch.cuda.mem_get_info(index))
        capability = f"compute capability {device.major}.{device.minor}"
        descriptions.append(f"{device.name}, {free:.0f} of {total:.0f} GiB free, {capability}")
    text, advice = f"{built}, NVIDIA driver {driver_version()}; {'; '.join(descriptions)}", ""
    if full_precision()[1] == "float16":
        advice = (
            "No bfloat16 support: use --bf16 false --fp16 true, and an engine in float16 "
            "(docs/installation.md)."
        )
    return Line(
        "torch", text, Status.NOTE if advice else Status.OK, advice, {"gpus": len(descriptions)}
    )


def describe_cpu(built: str) -> Line:
    """Describe the processor, on which everything runs."""
    cpu = torch.cpu.get_capabilities()
    processor = f"{cpu['cpu_name']}, {(count := torch.get_num_threads())} thread{'s' * (count > 1)}"
    text, advice = f"{built}, no NVIDIA driver: everything runs on the CPU ({processor})", ""
    if not any(cpu.get(name) for name in BF16_INSTRUCTIONS):
        advice = (
            "This CPU emulates bfloat16, in 16-bit rollouts and in bf16 training: train in float32 "
            "(--bf16 false)."
        )
        if saturates():
            advice += (
                " And vLLM's INT8 sums saturate here, because there is no VNNI: good for a trial "
                "only."
            )
    return Line("torch", text, Status.NOTE if advice else Status.OK, advice)


def check_formats() -> Line:
    """List the formats with vLLM kernels on this machine, and what the others need."""
    here = [*candidates(None), UNQUANTIZED]
    text = f"vLLM runs {', '.join(here)} (16 bits) here"
    others = [
        f"{name} {'.'.join(map(str, SCHEMES[name].lowest_gpu))}"
        for name in SCHEMES
        if name not in here
    ]
    if others:
        text += f". Lowest compute capability for the others: {', '.join(others)}"
    evidence = Evidence.SIMULATED if torch.cuda.is_available() else Evidence.READ
    return Line("formats", text, data={"formats": here}, evidence=evidence)
