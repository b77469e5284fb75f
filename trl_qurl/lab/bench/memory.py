"""Compute from sizes alone whether a training step fits on this device."""

from __future__ import annotations

from typing import Any, NamedTuple

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


def find_device() -> Device:
    """Return the first GPU, or this machine if there is none."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return Device(f"the GPU ({properties.name})", properties.total_memory, True)
    import psutil

    return Device("this machine", psutil.virtual_memory().available, False)


def count_parameters(model: Any, lora_rank: int) -> tuple[int, int]:
    """Count the parameters of a policy on the meta device and of an adapter on its linear layers."""
    from trl_qurl.quantization.layers import linear_layer_names

    widths = sum(sum(model.get_submodule(name).weight.shape) for name in linear_layer_names(model))
    return sum(parameter.numel() for parameter in model.parameters()), lora_rank * widths


def why_too_large(model: Any, lora_rank: int, device: Device, engine_share: float = ENGINE_SHARE) -> str | None:
    """Explain why a training step does not fit beside an engine, and what would; return `None` if it fits."""

    def step_bytes(rank: int) -> int:
        count, adapter = count_parameters(model, rank)
        return FROZEN * count + TRAINED * adapter if rank else TRAINED * count

    count, _ = count_parameters(model, 0)
    engine = engine_share * device.memory if device.is_gpu else 2 * count
    room = (1 - SPARE) * device.memory - engine
    if step_bytes(lora_rank) <= room:
        return None
    return (
        f"A training step of {count / 1e9:.2f} billion parameters needs {step_bytes(lora_rank) / 1e9:.0f} GB for "
        "weights, gradients and AdamW. With the engine and activations, this exceeds the "
        f"{device.memory / 1e9:.0f} GB of {device.name}, so only the engine is measured. "
        + ("Use --lora-rank 16 to measure a whole step." if step_bytes(16) <= room else "Use a smaller model.")
    )
