"""Eight-bit weights and activations (W8A8): the formats of the paper.

Weights have a scale per output channel. Activations have a scale per token, which the engine computes at run time, so
nothing is calibrated (Sec. 5 of arXiv 2602.13953).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trl_qurl.quantization.schemes.rounding import channel_chunks, divide_by_scale, divide_exactly, to_fp8
from trl_qurl.quantization.schemes.scheme import KernelFault, QuantizationScheme, StoredTensor


@dataclass(frozen=True, kw_only=True)
class ChannelwiseScheme(QuantizationScheme):
    """Weights rounded with a scale per output channel, activations with a scale per token; codes have `dtype`."""

    dtype: torch.dtype
    code_min: float
    code_max: float
    weight_bits: int = 8

    def layout(self, shape: Sequence[int], dtype: torch.dtype) -> list[StoredTensor]:  # noqa: D102
        return [
            StoredTensor("weight", self.dtype, torch.Size(shape)),
            StoredTensor("weight_scale", dtype, torch.Size((shape[0], 1))),
        ]

    def _quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        codes = torch.empty_like(weight, dtype=self.dtype)  # (out, in)
        scale = weight.new_empty(weight.shape[0], 1)  # (out, 1)
        for chunk in channel_chunks(weight):
            quotient, scale[chunk] = divide_by_scale(weight[chunk], self.code_min, self.code_max)
            codes[chunk] = to_fp8(quotient) if self.dtype.is_floating_point else quotient.round_()
        return {"weight": codes, "weight_scale": scale}

    def dequantize(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:  # noqa: D102
        scale = tensors["weight_scale"]
        return tensors["weight"].to(scale.dtype) * scale

    def codes(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:  # noqa: D102
        return tensors["weight"].view(torch.uint8)

    def quantize_activations(self, activations: torch.Tensor) -> torch.Tensor:
        """Round activations as vLLM's kernels do: absmax becomes 127 or 448, so -128 is unused, unlike for weights."""
        tokens = activations.float()
        scale = divide_exactly(tokens.abs().amax(dim=-1, keepdim=True), self.code_max)
        scale = torch.where(scale == 0, 1.0, scale)
        codes = (tokens / scale).clamp(-self.code_max, self.code_max)
        codes = codes.to(self.dtype).float() if self.dtype.is_floating_point else codes.round()
        return (codes * scale).to(activations.dtype)


INT8 = ChannelwiseScheme(
    name="int8",
    preset="W8A8",
    checkpoint_format="int-quantized",
    description="INT8 weights with a scale per output channel, INT8 activations with a scale per token",
    dtype=torch.int8,
    code_min=-128.0,
    code_max=127.0,
    gpus=((7, 5), None),  # Turing and later
    cpus=True,
    is_smoothed=True,
    # On Blackwell and later vLLM's CUTLASS kernels are for FP8 only, which the INT8 one does not say before it runs.
    kernel_fault=KernelFault((10, 0), ("CutlassInt8ScaledMMLinearKernel",), "TritonInt8ScaledMMLinearKernel"),
)

FP8 = ChannelwiseScheme(
    name="fp8",
    preset="FP8_DYNAMIC",
    checkpoint_format="float-quantized",
    description="FP8 (E4M3) weights with a scale per output channel, FP8 (E4M3) activations with a scale per token",
    dtype=torch.float8_e4m3fn,
    code_min=-448.0,
    code_max=448.0,
    gpus=((8, 9), None),  # Ada and later
    cpus=False,  # emulated there: minutes for a rollout
)
