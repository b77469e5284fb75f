"""Quantization schemes: how a format stores weights, and where it runs."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from trl_qurl.quantization import packing
from trl_qurl.quantization.checks.shapes import storage_obstacle

HEAD = "lm_head"  # last part of an output head's name

LINEAR = torch.nn.Linear(1, 1, device="meta")  # stand-in for patterns that match class names


class KernelFault(NamedTuple):
    """Kernels that vLLM selects even though they fail on a GPU or change the weights."""

    lowest: tuple[int, int]  # lowest affected CUDA compute capability
    kernels: tuple[str, ...]  # their class names in vLLM


@dataclass(frozen=True, kw_only=True)
class QuantizationScheme:
    """A format for the weights, and possibly the activations, of linear layers.

    On GPUs below `lowest_gpu`, vLLM may still run the weights with exact activations; our commands
    and trainers refuse to.
    """

    name: str  # what users write (`rollout_quantization="int8"`)
    preset: str  # name of the same format among compressed-tensors' presets
    checkpoint_format: str  # compressed-tensors' name for the storage format of weights
    # Lowest CUDA compute capability with kernels in vLLM, not counting emulation.
    lowest_gpu: tuple[int, int]
    # Instructions that vLLM's kernels for CPUs need, as torch names them; `None` without kernels.
    cpus: str | None
    heads: bool = True  # whether vLLM can load an output head in this format
    # Whether to smooth activations (`smoothing`): this helps formats with few integer levels.
    is_smoothed: bool = False
    kernel_fault: KernelFault | None = None  # kernels that an engine must not use on some GPUs

    @property
    def label(self) -> str:
        """Name for titles and tables."""
        return self.name.upper()

    @functools.cached_property
    def library_scheme(self) -> Any:
        """compressed-tensors' scheme of the same format.

        The first use imports the library, which takes a second.
        """
        from compressed_tensors.quantization import preset_name_to_scheme

        return preset_name_to_scheme(self.preset, targets=["Linear"])

    @functools.cached_property
    def served_as(self) -> str:
        """The format in a few words, as an engine finds it in a checkpoint."""
        group = self.library_scheme.model_dump(mode="json")
        return served_as(group | {"format": self.checkpoint_format})

    def runs_on(self, capability: tuple[int, int] | None) -> bool:
        """Return whether vLLM has kernels for this format.

        Args:
            capability: CUDA compute capability of a GPU; `None` for this machine's CPU.

        Returns:
            True if rollouts in this format make sense on that device.
        """
        if capability is not None:
            return capability >= self.lowest_gpu
        return self.cpus is not None and bool(torch.cpu.get_capabilities().get(self.cpus))

    def layout(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Describe the result of `quantize` without rounding anything.

        Args:
            weight: Weight, (out, in), on any device, such as meta.

        Returns:
            The same tensors on the meta device, by name, in the same order.
        """
        args = self.library_scheme.weights
        height, width = args.block_structure or (1, args.group_size or 1)
        small = _sample(self, height, width, weight.dtype)
        large = _sample(self, 2 * height, 2 * width, weight.dtype)
        blocks = (weight.shape[0] // height, weight.shape[1] // width)
        result = {}
        for name, tensor in small.items():
            # Every dimension is constant or proportional to one of the weight's.
            sizes = zip(tensor.shape, large[name].shape, blocks, strict=False)
            shape = [one + (two - one) * (count - 1) for one, two, count in sizes]
            result[name] = torch.empty(shape, dtype=tensor.dtype, device="meta")
        return result

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Quantize one weight matrix.

        Arithmetic is in the weight's dtype, as in llm-compressor. Pass float32 master weights if
        available: bfloat16 rounds quotients near 127 to multiples of 0.5 before they become codes.

        Args:
            weight: Weight, (out, in), of any floating-point dtype. Not modified.

        Returns:
            The tensors for a checkpoint, by name, bit for bit as llm-compressor writes them.

        Raises:
            ValueError: If the scheme cannot store this weight; see `checks/shapes.py`.
        """
        reason = storage_obstacle(self.library_scheme.weights, weight.shape, weight.dtype)
        if reason is not None:
            raise ValueError(
                f"{self.name} cannot quantize this layer: {reason}. Add it to quantization_ignore."
            )
        with torch.no_grad():
            return packing.pack(weight, self.library_scheme, self.checkpoint_format)

    def dequantize(
        self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Compute the weight that quantized tensors represent.

        Args:
            tensors: Result of `quantize`.
            dtype: Dtype of an engine, which rounds scales of packed integers to it; `None` leaves
                them as they are.

        Returns:
            The weight, (out, in), in the dtype of its scales.
        """
        if dtype is not None and "weight_shape" in tensors:
            scale = tensors["weight_scale"]
            tensors = {**tensors, "weight_scale": scale.to(dtype).to(scale.dtype)}
        return packing.dequantize(tensors, self.library_scheme.weights)


Rule = tuple[str, QuantizationScheme | None]
"""A pattern, and the format of the layers that it matches first; `None` is 16 bits."""


def served_as(group: Mapping[str, Any], checkpoint_format: str | None = None) -> str:
    """Describe a group of a `quantization_config`; no two formats have the same description."""
    parts = []
    for kind, name in (("weights", "weights"), ("input_activations", "activations")):
        args = group.get(kind)
        if args:
            size = args.get("block_structure") or args.get("group_size") or ""
            form = f"{args['num_bits']}-bit {args['type']} {name}"
            parts.append(f"{form} per {args['strategy']} {size}".rstrip())
    return f"{', '.join(parts)}, {group.get('format') or checkpoint_format}"


@functools.cache
def _sample(
    scheme: QuantizationScheme, height: int, width: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Quantize a weight of zeros. Meta tensors fail in compressed-tensors 0.18."""
    return scheme.quantize(torch.zeros(height, width, dtype=dtype))
