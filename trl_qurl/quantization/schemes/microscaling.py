"""MXFP8 of the OCP microscaling standard: groups of 32 numbers in FP8 (E4M3) that share a power of two.

Weights and activations have the same groups. A shared power is stored as its exponent, in a byte (E8M0).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trl_qurl.quantization.schemes.rounding import channel_chunks, to_fp8
from trl_qurl.quantization.schemes.scheme import QuantizationScheme, StoredTensor

MANTISSA_BITS = 23  # of float32, whose exponents have E8M0's bias
LARGEST_EXPONENT = 8  # of E4M3
QUARTER = 1 << (MANTISSA_BITS - 2)
"""Added to a float32's bits, it raises the exponent where the mantissa is 1.75 or more: 448 is 1.75 times 2^8."""


@dataclass(frozen=True, kw_only=True)
class MicroscalingScheme(QuantizationScheme):
    """Weights and activations rounded to E4M3 with a power of two per `group_size` consecutive inputs."""

    group_size: int
    weight_bits: int = 8
    code_max: float = 448.0

    def refusal(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> str | None:  # noqa: D102
        if len(shape) == 2 and shape[1] % self.group_size:
            return f"it has {shape[1]} inputs, which groups of {self.group_size} do not divide"
        return super().refusal(shape, dtype)

    def layout(self, shape: Sequence[int], dtype: torch.dtype) -> list[StoredTensor]:  # noqa: D102
        outputs, inputs = shape
        return [
            StoredTensor("weight", torch.float8_e4m3fn, torch.Size(shape)),
            StoredTensor("weight_scale", torch.uint8, torch.Size((outputs, inputs // self.group_size))),
        ]

    def _quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        tensors = {
            stored.name: torch.empty(stored.shape, dtype=stored.dtype, device=weight.device)
            for stored in self.layout(weight.shape, weight.dtype)
        }
        for chunk in channel_chunks(weight):
            groups = weight[chunk].float().unflatten(1, (-1, self.group_size))  # (n, groups, group_size)
            absmax = groups.abs().amax(dim=-1)  # (n, groups)
            exponent = shared_exponent(absmax, QUARTER)
            if weight.dtype == torch.float16:  # llm-compressor computes in it, where small powers do not exist
                smallest = torch.finfo(weight.dtype).smallest_normal
                normal = shared_exponent(torch.full_like(absmax, smallest), QUARTER)
                exponent = torch.where(absmax < smallest, normal, exponent)
                exponent.masked_fill_(absmax < 0.75 * smallest, 127)  # 2^0
            quotient = groups / power(exponent).unsqueeze(-1)
            codes = to_fp8(quotient.clamp_(-self.code_max, self.code_max))
            tensors["weight"][chunk] = codes.flatten(1)
            tensors["weight_scale"][chunk] = exponent
        return tensors

    def dequantize(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:  # noqa: D102
        groups = tensors["weight"].float().unflatten(1, (-1, self.group_size))
        return (groups * power(tensors["weight_scale"]).unsqueeze(-1)).flatten(1)

    def codes(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:  # noqa: D102
        return tensors["weight"].view(torch.uint8)

    def quantize_activations(self, activations: torch.Tensor) -> torch.Tensor:
        """Round activations as vLLM's kernels do: with the smallest power of two that brings each group below 448."""
        groups = activations.float().unflatten(-1, (-1, self.group_size))  # (..., groups, group_size)
        exponent = shared_exponent(groups.abs().amax(dim=-1, keepdim=True), QUARTER - 1)
        scale = power(exponent)
        codes = (groups / scale).to(torch.float8_e4m3fn)
        return (codes.float() * scale).flatten(-2).to(activations.dtype)


def shared_exponent(absmax: torch.Tensor, rounding: int) -> torch.Tensor:
    """The biased exponents (uint8) of the powers of two for groups with these largest magnitudes (float32, >= 0)."""
    raised = (absmax.view(torch.int32) + rounding) >> MANTISSA_BITS
    return raised.sub_(LARGEST_EXPONENT).clamp_(min=0).to(torch.uint8)


def power(exponent: torch.Tensor) -> torch.Tensor:
    """The powers of two (float32) that biased exponents stand for, the same bits on every device."""
    exponent = exponent.to(torch.int32)
    bits = torch.where(exponent == 0, 1 << (MANTISSA_BITS - 1), exponent << MANTISSA_BITS)  # 2^-127 is subnormal
    return bits.to(torch.int32).view(torch.float32)


MXFP8 = MicroscalingScheme(
    name="mxfp8",
    preset="MXFP8",
    checkpoint_format="mxfp8-quantized",
    description="FP8 (E4M3) weights and activations with a power of two per group of 32 inputs (MXFP8)",
    group_size=32,
    gpus=((10, 0), None),  # Blackwell and later; on older ones vLLM takes a kernel that leaves activations alone
    cpus=False,
)
