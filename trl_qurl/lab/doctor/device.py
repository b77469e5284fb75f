"""Lines that require torch: the GPUs it sees, the formats with kernels, and how the device divides."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trl_qurl.lab.device import full_precision
from trl_qurl.lab.doctor.driver import driver_version
from trl_qurl.lab.doctor.lines import Line, failed, note, ok, skipped
from trl_qurl.quantization.formats import SCHEMES, available_schemes
from trl_qurl.quantization.scheme import QuantizationScheme

GIB = 1024**3
SHAPE = (512, 1024)
"""Shape of the weights to round: half a million quotients; multiplying by reciprocals would change hundreds."""


def describe(_: str) -> Iterator[Line]:
    """Report torch's build, its GPUs, the formats with kernels, and the division check."""
    cuda, sees_gpus = torch.version.cuda, torch.cuda.is_available()
    built = f"torch {torch.__version__}, built {f'for CUDA {cuda}' if cuda else 'without CUDA'}"
    if cuda and not sees_gpus and driver_version() is not None:
        advice = "Check the line `driver`, CUDA_VISIBLE_DEVICES, and the container's GPU access (--gpus all)."
        yield failed("torch", f"{built}, sees no GPU, although a driver responds.", advice)
    else:
        yield ok("torch", f"{built}, sees {torch.cuda.device_count() if sees_gpus else 'no'} GPUs")
    yield describe_gpus()
    yield describe_formats()
    yield compare_division(torch.device("cuda")) if sees_gpus else skipped("division", "needs a GPU")


def describe_gpus() -> Line:
    """Describe each GPU; other checks read their number from `data`."""
    if not torch.cuda.is_available():
        return ok("gpus", "none: everything runs on the CPU", count=0)
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    text = "; ".join(
        f"{device.name}, {device.total_memory / GIB:.0f} GiB, compute capability {device.major}.{device.minor}"
        for device in devices
    )
    if len({(device.major, device.minor) for device in devices}) > 1:
        advice = "Select GPUs of one kind with CUDA_VISIBLE_DEVICES; the following lines cover only the first GPU."
        return note("gpus", f"{text}.", advice, count=len(devices))
    if full_precision()[1] == "float16":
        advice = "No bfloat16 support: use --bf16 false --fp16 true, and an engine in float16 (docs/installation.md)."
        return note("gpus", f"{text}.", advice, count=len(devices))
    return ok("gpus", text, count=len(devices))


def describe_formats() -> Line:
    """List the formats with vLLM kernels on this machine, according to the schemes."""
    here = [scheme.name for scheme in available_schemes()]
    others = [name for name in SCHEMES if name not in here]
    text = f"vLLM has kernels here for {', '.join([*here, 'none (16 bits)'])}"
    text += f", but not for {', '.join(others)}" if others else ""
    if not here:
        return note("formats", f"{text}.", "Only unquantized rollouts work here.", formats=here)
    return ok("formats", text, formats=here)


def compare_division(device: torch.device) -> Line:
    """Compare rounding on both devices: on a GPU, PyTorch may multiply by the reciprocal instead of dividing."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(SHAPE, generator=generator)
    differing = {
        f"{scheme.name} {name} ({str(dtype).removeprefix('torch.')})": share
        for scheme in SCHEMES.values()
        for dtype in (torch.float32, torch.bfloat16)
        for name, share in differing_shares(scheme, weights.to(dtype), device).items()
        if share
    }
    if differing:
        text = "; ".join(f"{share:.2%} of {name}" for name, share in differing.items())
        advice = (
            "Checkpoints from a CPU and from this GPU are not bit-identical: please open an issue with the output of "
            "`trl-qurl doctor --json`. Training is not affected, except with weight_sync='llmcompressor'."
        )
        return failed("division", f"{device.type} rounds differently from the CPU: {text}.", advice, shares=differing)
    return ok("division", f"codes and scales of {', '.join(SCHEMES)} are bit-identical to the CPU's")


def differing_shares(scheme: QuantizationScheme, weight: torch.Tensor, device: torch.device) -> dict[str, float]:
    """Return the share of bytes that differ between the CPU and the device, by tensor of the format."""
    here, there = scheme.quantize(weight), scheme.quantize(weight.to(device))
    return {
        name: (tensor.contiguous().view(torch.uint8) != there[name].cpu().contiguous().view(torch.uint8))
        .float()
        .mean()
        .item()
        for name, tensor in here.items()
    }
