"""From a model's parameters to the tensors of its quantized checkpoint: form, layers and scheme of one model together.

`checkpoint_form` cuts and names, `layers` says what is quantized, and `stream` quantizes.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from trl_qurl.quantization.checkpoint_form import CheckpointForm, parameter_name, persistent_buffers
from trl_qurl.quantization.layers import linear_layer_names, quantized_layer_names
from trl_qurl.quantization.schemes import QuantizationScheme, StoredTensor
from trl_qurl.quantization.smoothing import Smoothing
from trl_qurl.quantization.stream import NamedTensors, Observer, quantize_weights, stored_tensors


class WeightStream:
    """Turns parameters of one model into tensors of its checkpoint, any number of times.

    Args:
        model: A transformers model, or a PEFT model around one.
        scheme: Target format; `None` quantizes nothing.
        ignore: Modules kept in full precision, as `quantized_layer_names` takes them.
        smooths: Whether `smoothing` is folded into the weights.

    Raises:
        ValueError: As `quantized_layer_names`, `CheckpointForm` and `Smoothing` do.
    """

    def __init__(
        self,
        model: Any,
        scheme: QuantizationScheme | None,
        ignore: Sequence[str] = ("lm_head",),
        smooths: bool = False,
    ) -> None:
        self.scheme = scheme
        self.form = CheckpointForm(model, splits_experts=scheme is not None)
        self.layers = quantized_layer_names(model, ignore, scheme) if scheme else linear_layer_names(model, ignore)
        self.smoothing = Smoothing(model, self.layers) if smooths else None

    def tensors(
        self,
        named_parameters: NamedTensors,
        observer: Observer | None = None,
        dtype: torch.dtype | None = None,
        left_out: Collection[str] = (),
        is_exact: bool = False,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Turn parameters into tensors, one at a time.

        Args:
            named_parameters: Parameters under their names in the model, without adapters.
            observer: Sees each layer, for measurements.
            dtype: Floating-point type of the tensors that are not quantized; `None` leaves them as they are.
            left_out: Parameters to leave out.
            is_exact: Whether weights are quantized in float32, whatever dtype they are held in.

        Yields:
            `(name, tensor)` pairs in checkpoint format.
        """
        kept = ((name, tensor) for name, tensor in named_parameters if name not in left_out)
        missing = {held.removesuffix(".weight") for name in left_out for held in self.form.held.get(name, ())}
        tensors = self.form.tensors(kept)
        if self.smoothing is not None:
            tensors = self.smoothing.fold(tensors)
        exact = exact_weights(tensors, self.layers) if is_exact else tensors
        return quantize_weights(exact, self.scheme, self.layers - missing, observer, dtype)

    def stored(self, parameter: str, dtype: torch.dtype | None = None) -> list[StoredTensor]:
        """What `tensors` yields for one parameter, by its name."""
        held = self.form.held[parameter].items()
        return [
            stored for name, tensor in held for stored in stored_tensors(name, tensor, self.scheme, self.layers, dtype)
        ]

    def nbytes(self, dtype: torch.dtype | None = None) -> int:
        """Bytes of all that `tensors` yields."""
        return sum(stored.nbytes for parameter in self.form.held for stored in self.stored(parameter, dtype))


def exact_weights(parameters: NamedTensors, layers: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters with the weights to quantize in float32: whoever holds them, in any dtype, makes the same codes."""
    return ((name, t.float() if name.removesuffix(".weight") in layers else t) for name, t in parameters)


def model_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a model that is whole and in memory, without adapters, for `WeightStream.tensors`."""
    named = itertools.chain(model.named_parameters(), persistent_buffers(model))
    return ((parameter_name(path), tensor.data) for path, tensor in named if ".lora_" not in path)
