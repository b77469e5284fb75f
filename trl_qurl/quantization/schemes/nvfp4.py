"""NVFP4 weights: four-bit floating-point codes (E2M1) in groups of 16 with a scale in FP8; activations are left alone.

The scales of a weight share a number in 32 bits, so that FP8 covers them. Layers that an engine fuses (query, key and
value; gate and up) share that number, too: it comes from the largest weight of them all.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from trl_qurl.quantization.schemes.rounding import channel_chunks, divide_exactly
from trl_qurl.quantization.schemes.scheme import QuantizationScheme, StoredTensor

CODES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The magnitudes of E2M1, by the lowest three bits of a code; the fourth is the sign."""

BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between them. A tie goes to the code that ends in 0, so every other midpoint is part of what is above."""

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""Names of layers that an engine fuses where all of them are in one module, as in llm-compressor."""

LARGEST_SCALE = 448.0
SMALLEST_SCALE = 0.125
"""What llm-compressor has in place of a scale that FP8 rounds to 0."""


@dataclass(frozen=True, kw_only=True)
class NVFP4Scheme(QuantizationScheme):
    """Weights rounded to E2M1 with an FP8 scale per `group_size` consecutive inputs, two codes to a byte."""

    group_size: int
    weight_bits: int = 4

    def refusal(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> str | None:  # noqa: D102
        if len(shape) == 2 and shape[1] % self.group_size:
            return f"it has {shape[1]} inputs, which groups of {self.group_size} do not divide"
        return super().refusal(shape, dtype)

    def companions(self, layer: str, layers: Collection[str]) -> tuple[str, ...]:
        """The other layers of a fused one, if all of them are quantized."""
        parent, _, own = layer.rpartition(".")
        for names in FUSED:
            others = tuple(f"{parent}.{name}" for name in names if name != own)
            if own in names and all(other in layers for other in others):
                return others
        return ()

    def layout(self, shape: Sequence[int], dtype: torch.dtype) -> list[StoredTensor]:  # noqa: D102
        outputs, inputs = shape
        return [
            StoredTensor("weight_packed", torch.uint8, torch.Size((outputs, inputs // 2))),
            StoredTensor("weight_scale", torch.float8_e4m3fn, torch.Size((outputs, inputs // self.group_size))),
            StoredTensor("weight_global_scale", torch.float32, torch.Size((1,))),
        ]

    def _quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return self._quantize_beside(weight, ())

    def _quantize_beside(self, weight: torch.Tensor, companions: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = {
            stored.name: torch.empty(stored.shape, dtype=stored.dtype, device=weight.device)
            for stored in self.layout(weight.shape, weight.dtype)
        }
        absmax = torch.stack([part.abs().amax().to(weight.device) for part in (weight, *companions)]).amax()
        shared = shared_scale(absmax)  # (1,)
        tensors["weight_global_scale"].copy_(shared)
        for chunk in channel_chunks(weight):
            groups = weight[chunk].unflatten(1, (-1, self.group_size))  # (n, groups, group_size)
            scale = shared * divide_exactly(groups.abs().amax(dim=-1, keepdim=True), CODES[-1].item())
            stored_scale = scale.clamp_(max=LARGEST_SCALE).to(torch.float8_e4m3fn)
            stored_scale = torch.where(stored_scale.float() == 0, SMALLEST_SCALE, stored_scale.float())
            codes = to_e2m1(groups / (stored_scale.to(scale.dtype) / shared)).flatten(1)  # (n, in)
            tensors["weight_packed"][chunk] = codes[:, ::2] | codes[:, 1::2] << 4
            tensors["weight_scale"][chunk] = stored_scale.squeeze(-1).to(torch.float8_e4m3fn)
        return tensors

    def dequantize(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:  # noqa: D102
        scale = tensors["weight_scale"].float() / tensors["weight_global_scale"]  # (out, groups)
        codes = self.codes(tensors).int()
        magnitudes = CODES.to(codes.device)[codes & 7]
        values = torch.where(codes > 7, -magnitudes, magnitudes).unflatten(1, (-1, self.group_size))
        return (values * scale.unsqueeze(-1)).flatten(1)

    def codes(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:  # noqa: D102
        packed = tensors["weight_packed"]
        return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def shared_scale(absmax: torch.Tensor) -> torch.Tensor:
    """The number (1,), float32, by which scales are multiplied before FP8 rounds them, for a largest weight.

    The largest scale, absmax / 6, becomes 448. Where absmax is so small that this overflows, it is 1.
    """
    reciprocal = absmax.clamp(min=torch.finfo(absmax.dtype).tiny).reciprocal()  # PyTorch's way to divide a number
    scale = reciprocal * (LARGEST_SCALE * CODES[-1].item())
    return torch.nan_to_num(scale, nan=1.0, posinf=1.0).float().reshape(1)


def to_e2m1(quotient: torch.Tensor) -> torch.Tensor:
    """Round to the nearest codes (uint8); what is too large becomes the largest."""
    magnitude = quotient.abs()
    codes = torch.zeros_like(quotient, dtype=torch.uint8)
    for index, bound in enumerate(BOUNDS):
        codes += (magnitude > bound) if index % 2 == 0 else (magnitude >= bound)
    return codes | ((quotient < 0).to(torch.uint8) << 3)


NVFP4A16 = NVFP4Scheme(
    name="nvfp4a16",
    preset="NVFP4A16",
    checkpoint_format="nvfp4-pack-quantized",
    description="NVFP4 weights (E2M1 with an FP8 scale per group of 16 inputs), activations in full precision",
    group_size=16,
    gpus=((7, 5), None),  # Turing and later, with the Marlin kernel; Blackwell has one of its own
    cpus=False,
)
