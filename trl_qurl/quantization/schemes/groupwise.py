"""Integer weights in groups, packed into 32-bit words; activations are left alone (W4A16, W8A16)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from trl_qurl.quantization.schemes.rounding import channel_chunks, divide_by_scale
from trl_qurl.quantization.schemes.scheme import QuantizationScheme, StoredTensor


@dataclass(frozen=True, kw_only=True)
class GroupwiseScheme(QuantizationScheme):
    """Weights rounded with a scale per `group_size` consecutive inputs, packed by compressed-tensors."""

    group_size: int

    def refusal(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> str | None:  # noqa: D102
        # llm-compressor refuses such widths as well, or fails on those below a group.
        if len(shape) == 2 and shape[1] % self.group_size:
            return f"it has {shape[1]} inputs, which groups of {self.group_size} do not divide"
        return super().refusal(shape, dtype)

    def layout(self, shape: Sequence[int], dtype: torch.dtype) -> list[StoredTensor]:  # noqa: D102
        outputs, inputs = shape
        return [
            StoredTensor("weight_packed", torch.int32, torch.Size((outputs, inputs * self.weight_bits // 32))),
            StoredTensor("weight_scale", dtype, torch.Size((outputs, inputs // self.group_size))),
            StoredTensor("weight_shape", torch.int64, torch.Size((2,))),
        ]

    def _quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        from compressed_tensors.compressors import pack_to_int32

        tensors = {
            stored.name: torch.empty(stored.shape, dtype=stored.dtype, device=weight.device)
            for stored in self.layout(weight.shape, weight.dtype)
        }
        tensors["weight_shape"].copy_(torch.tensor(weight.shape))
        half = 2 ** (self.weight_bits - 1)
        for chunk in channel_chunks(weight):
            groups = weight[chunk].unflatten(1, (-1, self.group_size))  # (n, groups, group_size)
            quotient, scale = divide_by_scale(groups, -half, half - 1)  # scale: (n, groups, 1)
            codes = quotient.round_().flatten(1).to(torch.int8)  # (n, in)
            tensors["weight_packed"][chunk] = pack_to_int32(codes, self.weight_bits)
            tensors["weight_scale"][chunk] = scale.squeeze(-1)
        return tensors

    def dequantize(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:  # noqa: D102
        scale = tensors["weight_scale"]  # (out, groups)
        codes = self._unpack(tensors).to(scale.dtype).unflatten(1, (-1, self.group_size))
        return (codes * scale.unsqueeze(-1)).flatten(1)

    def in_engine(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Round the scales to the engine's dtype, in which it keeps them."""
        scale = tensors["weight_scale"]
        return {**tensors, "weight_scale": scale.to(dtype).to(scale.dtype)}

    def codes(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:  # noqa: D102
        return self._unpack(tensors).view(torch.uint8)

    def _unpack(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The codes, (out, in), int8."""
        from compressed_tensors.compressors import unpack_from_int32

        outputs, groups = tensors["weight_scale"].shape
        shape = torch.Size((outputs, groups * self.group_size))
        return unpack_from_int32(tensors["weight_packed"], self.weight_bits, shape)


W4A16 = GroupwiseScheme(
    name="w4a16",
    preset="W4A16",
    checkpoint_format="pack-quantized",
    description="INT4 weights with a scale per group of 128 inputs, activations in full precision",
    weight_bits=4,
    group_size=128,
    gpus=((7, 5), None),  # Turing and later
    cpus=True,
)

W8A16 = replace(
    W4A16,
    name="w8a16",
    preset="W8A16",
    description="INT8 weights with a scale per group of 128 inputs, activations in full precision",
    weight_bits=8,
    cpus=False,  # vLLM's CPU kernel for packed weights takes four bits only
)
