"""Compute from sizes alone whether the policy fits on this device."""

from __future__ import annotations

from typing import Any, NamedTuple

from trl_qurl.lab.bench.workload import Workload

ENGINE_SHARE = 0.3  # share of a GPU for an engine that runs beside a trainer: TRL's default
WHOLE_SHARE = 0.9  # share of a GPU for an engine alone
SPARE = 0.1  # share for activations; if it is too small, training fails, but the engine's costs remain valid
TRAINED = 16  # bytes per trained parameter: 32-bit weight, gradient, and the two moments of AdamW
FROZEN = 4  # bytes per frozen parameter: only the weight


class Device(NamedTuple):
    """The device that runs a training step."""

    name: str
    memory: int  # bytes: total for a GPU, available for a machine
    is_gpu: bool


class Sizes(NamedTuple):
    """Parameter counts of the policy and of its adapter (0 without one)."""

    model: int
    adapter: int

    @property
    def step_bytes(self) -> int:
        """Memory for weights, gradients and optimizer."""
        return FROZEN * self.model + TRAINED * self.adapter if self.adapter else TRAINED * self.model

    def fits(self, device: Device, engine_share: float) -> bool:
        """Check whether a training step fits on the device beside an engine."""
        engine = engine_share * device.memory if device.is_gpu else 2 * self.model
        return self.step_bytes <= (1 - SPARE) * device.memory - engine


def find_device() -> Device:
    """Return the first GPU, or this machine if there is none."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return Device(f"the GPU ({properties.name})", properties.total_memory, True)
    import psutil

    return Device("this machine", psutil.virtual_memory().available, False)


def count_parameters(model: Any, lora_rank: int) -> Sizes:
    """Count the parameters of a policy on the meta device and of an adapter on its linear layers."""
    from trl_qurl.quantization.layers import linear_layer_names

    widths = sum(sum(model.get_submodule(name).weight.shape) for name in linear_layer_names(model))
    return Sizes(sum(parameter.numel() for parameter in model.parameters()), lora_rank * widths)


def why_too_large(model: Any, workload: Workload, device: Device, engine_share: float = ENGINE_SHARE) -> str | None:
    """Explain why a training step does not fit, and what would; return `None` if it fits."""
    sizes = count_parameters(model, workload.lora_rank)
    if sizes.fits(device, engine_share):
        return None
    adapter_fits = not workload.lora_rank and count_parameters(model, 16).fits(device, engine_share)
    return (
        f"A training step of {sizes.model / 1e9:.2f} billion parameters needs {sizes.step_bytes / 1e9:.0f} GB for "
        "weights, gradients and AdamW. With the engine and activations, this exceeds the "
        f"{device.memory / 1e9:.0f} GB of {device.name}, so only the engine is measured. "
        + ("Use --lora-rank 16 to measure a whole step." if adapter_fits else "Use a smaller model.")
    )
