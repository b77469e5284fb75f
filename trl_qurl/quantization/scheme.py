"""A quantization scheme: how a format stores weights, rounds activations, and where vLLM can run it."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from trl_qurl.quantization import packing
from trl_qurl.quantization.packing import StoredTensor

HEAD = "lm_head"
"""Last part of an output head's name."""

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""Layers that vLLM fuses when one module has all of them, as in llm-compressor."""


def quantized_targets(ignore: Sequence[str]) -> list[str]:
    """Return what is quantized, as compressed-tensors' patterns; vLLM's output head is not a `Linear`."""
    from compressed_tensors.utils import is_match

    keeps_head = is_match(HEAD, torch.nn.Linear(1, 1, device="meta"), tuple(ignore))
    return ["Linear"] if keeps_head else ["Linear", f"re:.*{HEAD}$"]


class KernelFault(NamedTuple):
    """Kernels that vLLM chooses although they fail on a GPU or change the weights.

    Attributes:
        lowest: Lowest CUDA compute capability that is affected.
        kernels: Names of their classes in vLLM.
        instead: The class that vLLM chooses once they are disabled.
    """

    lowest: tuple[int, int]
    kernels: tuple[str, ...]
    instead: str


@dataclass(frozen=True, kw_only=True)
class QuantizationScheme:
    """A format for the weights, and possibly the activations, of linear layers.

    Attributes:
        name: What users write (`rollout_quantization="int8"`).
        preset: Name of the same format among compressed-tensors' presets.
        checkpoint_format: compressed-tensors' name for the way it stores weights.
        description: The format in a few words, for model cards and help texts.
        gpus: Lowest CUDA compute capability for which vLLM has kernels, emulation not counted, and the first that is
            too high (`None` for no limit). Below the lowest, vLLM may still run the weights with exact activations.
        cpus: Whether vLLM has kernels for CPUs.
        round_activations: Function that rounds a layer's inputs (..., in) as vLLM's kernels do; `None` if they stay
            exact.
        heads: Whether vLLM can load an output head in this format.
        is_smoothed: Whether to smooth activations (`smoothing`), which pays for formats with few integer levels.
        kernel_fault: Kernels that an engine must not use on some GPUs.
    """

    name: str
    preset: str
    checkpoint_format: str
    description: str
    gpus: tuple[tuple[int, int], tuple[int, int] | None]
    cpus: bool
    round_activations: Callable[[torch.Tensor], torch.Tensor] | None = None
    heads: bool = True
    is_smoothed: bool = False
    kernel_fault: KernelFault | None = None

    @property
    def label(self) -> str:
        """The name for titles and tables."""
        return self.name.upper()

    @property
    def library_scheme(self) -> Any:
        """compressed-tensors' scheme of the same format."""
        return _preset(self.preset)

    @property
    def weight_args(self) -> Any:
        """compressed-tensors' arguments for the weights."""
        return self.library_scheme.weights

    @property
    def weight_bits(self) -> int:
        """Bits of one weight."""
        bits: int = self.weight_args.num_bits
        return bits

    @property
    def served_as(self) -> str:
        """How an engine identifies the format: a checkpoint format alone may have several widths or shapes."""
        blocks = " in blocks" if self.weight_args.block_structure else ""
        return f"{self.weight_bits}-bit {self.checkpoint_format}{blocks}"

    def runs_on(self, capability: tuple[int, int] | None) -> bool:
        """Return whether vLLM has kernels for this format.

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
        """Return whether vLLM's kernels round activations there.

        Args:
            capability: CUDA compute capability of a GPU; `None` for a CPU.

        Returns:
            Whether they do. On older GPUs vLLM runs FP8 and MXFP8 checkpoints with kernels for weights alone.
        """
        return capability is None or capability >= self.gpus[0]

    def layout(self, shape: Sequence[int], dtype: torch.dtype) -> list[StoredTensor]:
        """Describe the tensors that a weight becomes.

        Args:
            shape: Shape of the weight, (out, in).
            dtype: Its dtype.

        Returns:
            One entry per tensor of `quantize`, in the same order; names follow the layer's, such as `"weight_scale"`.
        """
        return list(_layout(self, tuple(shape), dtype))

    def companions(self, layer: str, layers: Collection[str]) -> tuple[str, ...]:
        """Return the layers whose weights also determine the scales of a layer.

        NVFP4's layers share a number if vLLM fuses them.

        Args:
            layer: Name of a layer.
            layers: Names of all quantized layers.

        Returns:
            Names in `layers`; each of these has all the others as companions.
        """
        parent, _, own = layer.rpartition(".")
        for names in FUSED if self.weight_args.strategy == "tensor_group" else ():
            others = tuple(f"{parent}.{name}" for name in names if name != own)
            if own in names and all(other in layers for other in others):
                return others
        return ()

    def quantize(self, weight: torch.Tensor, companions: Sequence[torch.Tensor] = ()) -> dict[str, torch.Tensor]:
        """Quantize one weight matrix.

        Arithmetic is in the weight's dtype, as in llm-compressor. Pass float32 master weights if there are any:
        bfloat16 rounds quotients near 127 to multiples of 0.5 before they become codes.

        Args:
            weight: Weight, (out, in), of any floating-point dtype. Not modified.
            companions: Weights of the layers that `companions` returns.

        Returns:
            The tensors of a checkpoint by name, bit for bit as llm-compressor writes them.

        Raises:
            ValueError: If the scheme cannot store this weight; see `refusal`.
        """
        if reason := self.refusal(weight.shape, weight.dtype):
            raise ValueError(f"{self.name} cannot quantize this layer: {reason}. Add it to quantization_ignore.")
        with torch.no_grad():
            return self._quantize(weight, companions)

    def _quantize(self, weight: torch.Tensor, companions: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return packing.pack(weight, companions, self.library_scheme, self.checkpoint_format)

    def dequantize(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute the weight that quantized tensors represent.

        Args:
            tensors: Result of `quantize`.

        Returns:
            The weight, (out, in), in the dtype of its scales, or float32 where those have fewer than 16 bits.
        """
        return packing.dequantize(tensors, self.weight_args)

    def in_engine(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return what quantized tensors become in an engine, which keeps the scales of packed integers in its dtype.

        Args:
            tensors: Result of `quantize`.
            dtype: The engine's dtype.

        Returns:
            Tensors for `dequantize`.
        """
        scale = tensors["weight_scale"]
        rounded = {"weight_scale": scale.to(dtype).to(scale.dtype)} if "weight_shape" in tensors else {}
        return {**tensors, **rounded}

    def codes(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the codes, to count those that an update changes.

        Args:
            tensors: Result of `quantize`.

        Returns:
            One byte per weight, (out, in).
        """
        return packing.unpack(tensors, self.weight_args).view(torch.uint8)

    def quantize_activations(self, activations: torch.Tensor) -> torch.Tensor:
        """Round a layer's inputs as the engine's kernels do.

        Args:
            activations: Inputs, (..., in).

        Returns:
            The rounded inputs, in the same dtype; the same tensor if the format leaves them exact.
        """
        return activations if self.round_activations is None else self.round_activations(activations)

    def refusal(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> str | None:
        """Return why the scheme cannot store a weight.

        llm-compressor pads blocks, which vLLM's kernels refuse.

        Args:
            shape: Shape of the weight.
            dtype: Its dtype.

        Returns:
            A clause for an error message; `None` if it can.
        """
        if len(shape) != 2:
            return f"its weight has the shape {tuple(shape)}, not (out, in)"
        if not dtype.is_floating_point:
            return f"its weight is of dtype {dtype}, not a floating-point one"
        (outputs, inputs), args = shape, self.weight_args
        if args.block_structure and (outputs % args.block_structure[0] or inputs % args.block_structure[1]):
            height, width = args.block_structure
            return f"its weight of {outputs} x {inputs} is not made of whole blocks of {height} x {width}"
        if args.group_size and inputs % args.group_size:
            return f"it has {inputs} inputs, which groups of {args.group_size} do not divide"
        return None

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """Make the `quantization_config` of a checkpoint's `config.json`, from which vLLM learns the format.

        Args:
            ignore: Modules in full precision, as compressed-tensors' patterns.

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


@functools.cache  # PyTorch's meta kernels take milliseconds, and a model repeats its shapes
def _layout(scheme: QuantizationScheme, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[StoredTensor, ...]:
    tensors = scheme.quantize(torch.empty(shape, dtype=dtype, device="meta"))
    return tuple(StoredTensor(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())


@functools.cache
def _preset(name: str) -> Any:
    """Look up a preset of compressed-tensors, whose import takes a second."""
    from compressed_tensors.quantization import preset_name_to_scheme

    return preset_name_to_scheme(name, targets=["Linear"])
