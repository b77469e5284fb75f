"""What a quantization scheme is: the one description of a number format that everything else asks.

A scheme owns its tensors: their names, dtypes and shapes, how they are made from a weight, and what they stand for.
It also knows what the engine does to activations, how vLLM is told about the format, and on which hardware vLLM runs
it. No other part of the package knows any of this, so a new format is one file in this folder.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class StoredTensor(NamedTuple):
    """
    A tensor as a checkpoint stores it, without its values.

    Attributes:
        name: Its name.
        dtype: Its dtype.
        shape: Its shape.
    """

    name: str
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class QuantizationScheme(ABC):
    """
    A number format for the weights, and possibly the activations, of linear layers.

    Attributes:
        name: What users write (`rollout_quantization="int8"`).
        preset: The compressed-tensors preset with the same meaning, which llm-compressor applies and vLLM executes.
        checkpoint_format: compressed-tensors' name for the way codes are stored.
        weight_bits: Bits of a weight's code.
        description: The format in a few English words, for model cards and help texts.
        gpus: CUDA compute capabilities for which vLLM has kernels that multiply in this format, emulation not counted:
            the lowest one, and the first one that is too high (`None`: no limit).
        cpus: Whether it has such kernels for CPUs.
    """

    name: str
    preset: str
    checkpoint_format: str
    weight_bits: int
    description: str
    gpus: tuple[tuple[int, int], tuple[int, int] | None]
    cpus: bool

    @property
    def label(self) -> str:
        """The name as titles and tables show it."""
        return self.name.upper()

    def runs_on(self, capability: tuple[int, int] | None) -> bool:
        """
        Whether vLLM has kernels for this format. To override where more than `gpus` and `cpus` decides.

        Args:
            capability: CUDA compute capability of a GPU; `None` for the CPU of this machine.

        Returns:
            Whether rollouts in this format make sense there.
        """
        if capability is None:
            return self.cpus
        lowest, too_high = self.gpus
        return capability >= lowest and (too_high is None or capability < too_high)

    @abstractmethod
    def layout(self, shape: Sequence[int], dtype: torch.dtype) -> list[StoredTensor]:
        """
        The tensors that a weight becomes, in the order of `quantize`.

        Args:
            shape: Shape of the weight, (out, in).
            dtype: Its dtype.

        Returns:
            One entry per tensor, under the name that follows the layer's: `"weight"`, `"weight_scale"`.
        """

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        Round one weight matrix.

        Args:
            weight: Full-precision weight, (out, in), any floating-point dtype. Not modified.

        Returns:
            The tensors of `layout`, by name: bit for bit what llm-compressor writes for the same weight.

        Raises:
            ValueError: If the scheme cannot store this weight; see `refusal`.
        """
        if reason := self.refusal(weight.shape, weight.dtype):
            raise ValueError(f"{self.name} cannot quantize this layer: {reason}. Add it to quantization_ignore.")
        with torch.no_grad():
            return self._quantize(weight)

    @abstractmethod
    def _quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """What `quantize` returns, for a weight that the scheme can store."""

    @abstractmethod
    def dequantize(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """
        The weight that quantized tensors stand for.

        Args:
            tensors: What `quantize` returned.

        Returns:
            The weight, (out, in), in the dtype of its scales.
        """

    @abstractmethod
    def codes(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """
        The codes themselves, for counting those that an update changes.

        Args:
            tensors: What `quantize` returned.

        Returns:
            One byte per weight, (out, in).
        """

    def quantize_activations(self, activations: torch.Tensor) -> torch.Tensor:
        """
        What the engine's kernels make of a layer's input. By default they leave it alone.

        Args:
            activations: A layer's input, (..., in).

        Returns:
            The input, rounded and back, in its own dtype.
        """
        return activations

    def refusal(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> str | None:
        """
        Why the scheme cannot store a weight.

        Args:
            shape: Shape of the weight, (out, in) for a linear layer.
            dtype: Its dtype.

        Returns:
            A clause for an error message, or `None` if it can.
        """
        if len(shape) != 2:
            return f"its weight has the shape {tuple(shape)}, not (out, in)"
        return None if dtype.is_floating_point else f"its weight is of dtype {dtype}, not a floating-point one"

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """
        The `quantization_config` entry of a checkpoint's `config.json`, from which vLLM learns the format.

        Args:
            ignore: Modules kept in full precision, in compressed-tensors' pattern syntax.

        Returns:
            A JSON-serializable dictionary: what llm-compressor writes, except notes about itself (version, observers).
        """
        from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, preset_name_to_scheme

        group = preset_name_to_scheme(self.preset, targets=["Linear"])
        group.format = self.checkpoint_format
        config = QuantizationConfig(
            config_groups={"group_0": group},
            ignore=list(ignore),
            format=self.checkpoint_format,
            quantization_status=QuantizationStatus.COMPRESSED,
        )
        return config.model_dump(mode="json")
