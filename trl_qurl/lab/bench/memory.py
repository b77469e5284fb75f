"""Does the policy fit on this device? Computed from sizes, before anything is measured."""

from __future__ import annotations

from typing import Any, NamedTuple

from trl_qurl.lab.bench.workload import Workload

ENGINE_SHARE = 0.3  # of a GPU, for an engine beside a trainer: TRL's default
WHOLE_SHARE = 0.9  # for an engine alone on a GPU
SPARE = 0.1  # for activations; if that is too little, training fails, and the engine's costs are kept
TRAINED = 16  # bytes of a parameter: 32-bit weight, gradient, and the two moments of AdamW
FROZEN = 4  # the weight alone


class Device(NamedTuple):
    """Where a step runs."""

    name: str
    memory: int  # bytes: of a GPU all, of a machine what is free
    is_gpu: bool


class Sizes(NamedTuple):
    """Parameters of the policy, and of its adapter (0 without one)."""

    model: int
    adapter: int

    @property
    def step_bytes(self) -> int:
        """Memory of a step: weights, gradients, optimizer."""
        return FROZEN * self.model + TRAINED * self.adapter if self.adapter else TRAINED * self.model

    def fits(self, device: Device, engine_share: float) -> bool:
        """Whether a step fits beside an engine."""
        engine = engine_share * device.memory if device.is_gpu else 2 * self.model
        return self.step_bytes <= (1 - SPARE) * device.memory - engine


def find_device() -> Device:
    """The first GPU, or this machine."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return Device(f"the GPU ({properties.name})", properties.total_memory, True)
    import psutil

    return Device("this machine", psutil.virtual_memory().available, False)


def count_parameters(model: Any, lora_rank: int) -> Sizes:
    """Sizes of a policy on the meta device, with an adapter of that rank on its linear layers."""
    from trl_qurl.quantization.layers import linear_layer_names

    widths = sum(sum(model.get_submodule(name).weight.shape) for name in linear_layer_names(model))
    return Sizes(sum(parameter.numel() for parameter in model.parameters()), lora_rank * widths)


def why_too_large(model: Any, workload: Workload, device: Device, engine_share: float = ENGINE_SHARE) -> str | None:
    """Why a step of the policy does not fit, and what would; `None` if it does."""
    sizes = count_parameters(model, workload.lora_rank)
    if sizes.fits(device, engine_share):
        return None
    adapter_fits = not workload.lora_rank and count_parameters(model, 16).fits(device, engine_share)
    return (
        f"A step of {sizes.model / 1e9:.2f} billion parameters needs {sizes.step_bytes / 1e9:.0f} GB for weights, "
        "gradients and AdamW, beside the engine and activations, which do not fit into the "
        f"{device.memory / 1e9:.0f} GB of {device.name}. The engine is measured alone. "
        + ("For a whole step give --lora-rank 16." if adapter_fits else "A smaller model would fit.")
    )
