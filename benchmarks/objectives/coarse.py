"""Harsher quantizers that run through the engine's own INT8 kernel: codes and activations of fewer
bits.

Two of them are unbiased: on average over syncs, what is sent is the weight. `StochasticScheme`
rounds each weight up with a probability of what is cut off; `FeedbackScheme` adds what the last
sync cut off to the weight of the next.

Eight bits do too little harm to a model of half a million parameters to tell the objectives apart.
Weight codes of b bits are stored in int8 tensors, with absmax / (2^(b−1) − 1/2) as the scale, so
that nothing but the scheme's range changes. Activations are the kernel's own, of eight bits. For
some arms they are rounded to fewer per token before the kernel rounds them once more, which moves
them by at most 1/254 of the largest one.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from trl_qurl.quantization.formats import get_scheme, register_scheme
from trl_qurl.quantization.scheme import QuantizationScheme

CODE_BITS = {"int3": 3, "int4": 4, "int6": 6}
UNBIASED = ("int8_stochastic", "int8_feedback", "int3_stochastic", "int3_feedback")
"""Formats with codes that a second pass cannot repeat."""


@dataclass(frozen=True, kw_only=True)
class CoarseScheme(QuantizationScheme):
    """INT8 with weights of few bits, and activations of eight, as the kernel rounds them."""

    bits: int

    @property
    def library_scheme(self) -> Any:
        """INT8's scheme with fewer bits for the weights."""
        scheme = super().library_scheme
        return scheme.model_copy(
            update={"weights": scheme.weights.model_copy(update={"num_bits": self.bits})}
        )


@dataclass(frozen=True, kw_only=True)
class StochasticScheme(CoarseScheme):
    """[`CoarseScheme`] that rounds up or down at random: E[Q(W)] = W, with absmax / (2^(b−1) − 1)
    as the step.
    """

    generator: torch.Generator = field(
        default_factory=lambda: torch.Generator().manual_seed(0), compare=False
    )

    @torch.no_grad()
    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        half = 2 ** (self.bits - 1)
        scale = weight.abs().amax(1, keepdim=True) / (half - 1)  # (out, 1); no code is clipped
        scale = torch.where(scale > 0, scale, 1.0)
        codes = (weight / scale + torch.rand(weight.shape, generator=self.generator)).floor()
        return {"weight": codes.clamp(-half, half - 1).to(torch.int8), "weight_scale": scale}


@dataclass(frozen=True, kw_only=True)
class FeedbackScheme(CoarseScheme):
    """[`CoarseScheme`] of W + e, where e is what the last sync of the same weight has cut off."""

    # by the address of a weight
    cut_off: dict[int, torch.Tensor] = field(default_factory=dict, compare=False)

    @torch.no_grad()
    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        corrected = weight + self.cut_off.get(weight.data_ptr(), 0.0)
        tensors = super().quantize(corrected)
        self.cut_off[weight.data_ptr()] = corrected - self.dequantize(tensors)
        return tensors


def add_coarse_schemes() -> None:
    """Make `CODE_BITS` and `UNBIASED` known to the trainers of this process."""
    for name, bits in {**CODE_BITS, **{name: int(name[3]) for name in UNBIASED}}.items():
        kind = {"stochastic": StochasticScheme, "feedback": FeedbackScheme}.get(
            name[5:], CoarseScheme
        )
        int8 = get_scheme("int8")
        fields = {field.name: getattr(int8, field.name) for field in dataclasses.fields(int8)}
        register_scheme(kind(**{**fields, "name": name, "bits": bits}))


def round_activations(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Round each token's activations (..., D) to `bits` bits, symmetric, with absmax / (2^(b−1) −
    1) as the step.
    """
    step = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)  # (..., 1)
    return torch.where(step > 0, (x / step).round() * step, x).to(x.dtype)


def coarsen_activations(model: torch.nn.Module, bits: int) -> int:
    """Make the engine's INT8 layers round their inputs first, and return the number of layers.

    Raises:
        RuntimeError: the engine has no INT8 layer of the CPU kind, so nothing would be rounded.
    """
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        CompressedTensorsW8A8Int8,
    )

    from trl_qurl.rollout.repairs.cpu_int8_scales import ReloadableCPUInt8Kernel

    class CoarseActivations(ReloadableCPUInt8Kernel):
        def apply_weights(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            return super().apply_weights(layer, round_activations(x, bits), bias)

    count = 0
    for layer in model.modules():
        scheme = getattr(layer, "scheme", None)
        if isinstance(scheme, CompressedTensorsW8A8Int8):
            scheme.kernel = CoarseActivations(scheme.kernel.config, scheme.kernel.layer_param_names)
            count += 1
    if count == 0:
        raise RuntimeError(
            "The engine does not have an INT8 layer with activations to round to fewer bits."
        )
    return count
