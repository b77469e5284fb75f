"""FP8 weights with a scale per block of 128 x 128 (W8A8), as DeepSeek-V3 and the FP8 rollouts of other projects have.

Activations have a scale per token and group of 128 inputs, which the engine computes at run time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from trl_qurl.quantization.schemes.rounding import channel_chunks, divide_by_scale, divide_exactly, to_fp8
from trl_qurl.quantization.schemes.scheme import KernelFault, QuantizationScheme, StoredTensor

LEAST_ABSMAX = 1e-10
"""vLLM's kernels take this for groups of activations that are smaller."""


@dataclass(frozen=True, kw_only=True)
class BlockwiseScheme(QuantizationScheme):
    """Weights rounded to E4M3 with a scale per square block, activations with a scale per group of a block's width."""

    block_size: int
    weight_bits: int = 8
    code_max: float = 448.0

    @property
    def served_as(self) -> str:
        """The checkpoint format has other granularities as well."""
        return f"{super().served_as} in blocks"

    def refusal(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> str | None:  # noqa: D102
        # llm-compressor pads such layers. vLLM's kernels refuse the width, and blocks across layers that it fuses.
        if len(shape) == 2 and (shape[0] % self.block_size or shape[1] % self.block_size):
            size = self.block_size
            return f"its weight of {shape[0]} x {shape[1]} is not made of whole blocks of {size} x {size}"
        return super().refusal(shape, dtype)

    def layout(self, shape: Sequence[int], dtype: torch.dtype) -> list[StoredTensor]:  # noqa: D102
        blocks = torch.Size(length // self.block_size for length in shape)
        return [
            StoredTensor("weight", torch.float8_e4m3fn, torch.Size(shape)),
            StoredTensor("weight_scale", dtype, blocks),
        ]

    def _quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)  # (out, in)
        blocks, blocks_of_codes = self._blocks(weight), self._blocks(codes)
        scale = weight.new_empty(blocks.shape[:2])
        for rows in self._chunks(weight):
            quotient, part = divide_by_scale(blocks[rows].flatten(2), -self.code_max, self.code_max)
            blocks_of_codes[rows] = to_fp8(quotient).view(blocks[rows].shape)
            scale[rows] = part.squeeze(-1)
        return {"weight": codes, "weight_scale": scale}

    def dequantize(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:  # noqa: D102
        scale = tensors["weight_scale"]
        weight = tensors["weight"].to(scale.dtype)
        self._blocks(weight).mul_(scale[..., None, None])
        return weight

    def codes(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:  # noqa: D102
        return tensors["weight"].view(torch.uint8)

    def quantize_activations(self, activations: torch.Tensor) -> torch.Tensor:
        """Round activations as vLLM's kernels do: each group's absmax becomes 448."""
        groups = activations.float().unflatten(-1, (-1, self.block_size))  # (..., groups, block_size)
        absmax = groups.abs().amax(dim=-1, keepdim=True).clamp_(min=LEAST_ABSMAX)
        scale = divide_exactly(absmax, self.code_max)
        codes = (groups / scale).clamp_(-self.code_max, self.code_max).to(torch.float8_e4m3fn)
        return (codes.float() * scale).flatten(-2).to(activations.dtype)

    def _blocks(self, weight: torch.Tensor) -> torch.Tensor:
        """A view of a weight by its blocks, (rows of blocks, columns of blocks, block_size, block_size)."""
        size = self.block_size
        return weight.unflatten(1, (-1, size)).unflatten(0, (-1, size)).transpose(1, 2)

    def _chunks(self, weight: torch.Tensor) -> Iterator[slice]:
        """Slices of rows of blocks to round one after the other."""
        return channel_chunks(weight.reshape(-1, self.block_size * weight.shape[1]))


FP8_BLOCK = BlockwiseScheme(
    name="fp8_block",
    preset="FP8_BLOCK",
    checkpoint_format="float-quantized",
    description="FP8 (E4M3) weights with a scale per block of 128 x 128, FP8 (E4M3) activations with a scale per "
    "token and group of 128 inputs",
    block_size=128,
    gpus=((9, 0), None),  # Hopper and later; on older ones vLLM takes a kernel that leaves activations alone
    cpus=False,  # kernels for CPUs with AMX only, which leave activations alone or have one scale per token
    heads=False,  # vLLM's loader of heads wants a scale per token of the vocabulary
    # DeepGEMM rounds the weights again, to scales that are powers of two, and activations with such scales.
    kernel_fault=KernelFault(
        (9, 0),
        ("FlashInferFp8DeepGEMMDynamicBlockScaledKernel", "DeepGemmFp8BlockScaledMMKernel"),
        "CutlassFp8BlockScaledMMKernel",
    ),
)
