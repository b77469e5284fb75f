"""What a quantization scheme is: its tensors, what it does to activations, its name in vLLM, and its hardware.

No other part of the package knows anything about a number format, so a new one is one file in this folder.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

HEAD = "lm_head"
"""What output heads are called."""


def quantized_targets(ignore: Sequence[str]) -> list[str]:
    """What is quantized, in compressed-tensors' pattern syntax: vLLM's heads are no `Linear` and need their name."""
    from compressed_tensors.utils import is_match

    head_is_kept = is_match(HEAD, torch.nn.Linear(1, 1, device="meta"), tuple(ignore))
    return ["Linear"] if head_is_kept else ["Linear", f"re:.*{HEAD}$"]


class StoredTensor(NamedTuple):
    """A tensor as a checkpoint stores it, without its values.

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
        return self.shape.numel() * self.dtype.itemsize


class KernelFault(NamedTuple):
    """Kernels that vLLM chooses although they fail on the GPU, or compute with other weights than those it was sent.

    Attributes:
        lowest: Lowest CUDA compute capability on which they do.
        kernels: Their classes in vLLM.
        instead: The class that vLLM chooses once these are disabled.
    """

    lowest: tuple[int, int]
    kernels: tuple[str, ...]
    instead: str


@dataclass(frozen=True, kw_only=True)
class QuantizationScheme(ABC):
    """A number format for the weights, and possibly the activations, of linear layers.

    Attributes:
        name: What users write (`rollout_quantization="int8"`).
        preset: Name of the same format among compressed-tensors' presets.
        checkpoint_format: Compressed-tensors' name for the way codes are stored.
        weight_bits: Bits of a weight's code.
        description: The format in a few English words, for model cards and help texts.
        gpus: Lowest CUDA compute capability with kernels in vLLM (emulation not counted), and the first that is too
            high (`None`: no limit). Below the lowest, vLLM may still run the weights, with exact activations.
        cpus: Whether vLLM has kernels for CPUs.
        heads: Whether vLLM can load an output head in this format.
        is_smoothed: Whether large activations are made smaller before they are rounded (`smoothing`), where that
            was seen to help.
        kernel_fault: Kernels that an engine must be kept from choosing on some GPUs, if there are any.
    """

    name: str
    preset: str
    checkpoint_format: str
    weight_bits: int
    description: str
    gpus: tuple[tuple[int, int], tuple[int, int] | None]
    cpus: bool
    heads: bool = True
    is_smoothed: bool = False
    kernel_fault: KernelFault | None = None

    @property
    def label(self) -> str:
        """The name as titles and tables show it."""
        return self.name.upper()

    @property
    def served_as(self) -> str:
        """What an engine calls the format of its weights: packed codes of several widths share a checkpoint format."""
        return f"{self.weight_bits}-bit {self.checkpoint_format}"

    def runs_on(self, capability: tuple[int, int] | None) -> bool:
        """Tell whether vLLM has kernels for this format. Override it where more than `gpus` and `cpus` decides.

        Args:
            capability: CUDA compute capability of a GPU; `None` for the CPU of this machine.

        Returns:
            Whether rollouts in this format make sense there.
        """
        if capability is None:
            return self.cpus
        lowest, too_high = self.gpus
        return capability >= lowest and (too_high is None or capability < too_high)

    def rounds_activations(self, capability: tuple[int, int] | None) -> bool:
        """Tell whether vLLM's kernels there do what `quantize_activations` does.

        Args:
            capability: CUDA compute capability of a GPU; `None` for a CPU.

        Returns:
            Whether they do. On older GPUs vLLM runs FP8 and MXFP8 checkpoints with kernels for weights alone.
        """
        return capability is None or capability >= self.gpus[0]

    @abstractmethod
    def layout(self, shape: Sequence[int], dtype: torch.dtype) -> list[StoredTensor]:
        """Describe the tensors that a weight becomes, in the order of `quantize`.

        Args:
            shape: Shape of the weight, (out, in).
            dtype: Its dtype.

        Returns:
            One entry per tensor, under the name that follows the layer's: `"weight"`, `"weight_scale"`.
        """

    def companions(self, layer: str, layers: Collection[str]) -> tuple[str, ...]:
        """Name the layers whose weights decide about the codes of a layer as well. By default there are none.

        Args:
            layer: Name of a layer.
            layers: Names of all layers that are quantized.

        Returns:
            Names in `layers`. Each of these layers has all the others as companions.
        """
        return ()

    def quantize(self, weight: torch.Tensor, companions: Sequence[torch.Tensor] = ()) -> dict[str, torch.Tensor]:
        """Round one weight matrix.

        Args:
            weight: Weight, (out, in), of any floating-point dtype. Not modified.
            companions: Weights of the layers that `companions` names.

        Returns:
            The tensors of `layout`, by name: bit for bit what llm-compressor writes for the same weight.

        Raises:
            ValueError: If the scheme cannot store this weight; see `refusal`.
        """
        if reason := self.refusal(weight.shape, weight.dtype):
            raise ValueError(f"{self.name} cannot quantize this layer: {reason}. Add it to quantization_ignore.")
        with torch.no_grad():
            return self._quantize_beside(weight, companions) if companions else self._quantize(weight)

    @abstractmethod
    def _quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """What `quantize` returns, for a weight that the scheme can store."""

    def _quantize_beside(self, weight: torch.Tensor, companions: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """What `quantize` returns for a weight with companions."""
        raise NotImplementedError(f"{self.name} has no companions")

    @abstractmethod
    def dequantize(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute the weight that quantized tensors stand for.

        Args:
            tensors: What `quantize` returned.

        Returns:
            The weight, (out, in), in the dtype of its scales.
        """

    def in_engine(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Tell what becomes of quantized tensors when an engine loads them. By default it keeps them.

        Args:
            tensors: What `quantize` returned.
            dtype: The engine's dtype.

        Returns:
            Tensors for `dequantize`.
        """
        return dict(tensors)

    @abstractmethod
    def codes(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the codes, for counting those that an update changes.

        Args:
            tensors: What `quantize` returned.

        Returns:
            One byte per weight, (out, in).
        """

    def quantize_activations(self, activations: torch.Tensor) -> torch.Tensor:
        """Round a layer's input as the engine's kernels do. By default they leave it alone.

        Args:
            activations: A layer's input, (..., in).

        Returns:
            The input, rounded and back, in its own dtype.
        """
        return activations

    def refusal(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> str | None:
        """Tell why the scheme cannot store a weight.

        Args:
            shape: Shape of the weight.
            dtype: Its dtype.

        Returns:
            A clause for an error message, or `None` if it can.
        """
        if len(shape) != 2:
            return f"its weight has the shape {tuple(shape)}, not (out, in)"
        return None if dtype.is_floating_point else f"its weight is of dtype {dtype}, not a floating-point one"

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """Make the `quantization_config` entry of a checkpoint's `config.json`, from which vLLM learns the format.

        Args:
            ignore: Modules kept in full precision, in compressed-tensors' pattern syntax.

        Returns:
            What llm-compressor writes, except notes about itself (version, observers).
        """
        from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

        group = preset_name_to_scheme(self.preset, targets=quantized_targets(ignore))
        group.format = self.checkpoint_format
        config = QuantizationConfig(
            config_groups={"group_0": group},
            ignore=list(ignore),
            format=self.checkpoint_format,
            quantization_status="compressed",
        )
        return config.model_dump(mode="json")
