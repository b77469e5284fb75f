"""From a model's parameters to the tensors of its quantized checkpoint: form, layers and scheme of one model together.

`checkpoint_form` cuts and names, `layers` says what is quantized, and `stream` quantizes.
"""

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from trl_qurl.quantization.checkpoint_form import CheckpointForm, parameter_name, persistent_buffers
from trl_qurl.quantization.layers import linear_layer_names, quantized_layer_names
from trl_qurl.quantization.packing import StoredTensor
from trl_qurl.quantization.scheme import QuantizationScheme
from trl_qurl.quantization.smoothing import Smoothing
from trl_qurl.quantization.stream import NamedTensors, Observer, quantize_weights, stored_tensors


class WeightStream:
    """Turns parameters of one model into tensors of its checkpoint, any number of times.

    Args:
        model: A transformers model, or a PEFT model around one.
        scheme: Target format; `None` quantizes nothing.
        ignore: Modules kept in full precision, as `quantized_layer_names` takes them.
        smooths: Whether `smoothing` is folded into the weights.

    Attributes:
        grid: Type to which the trainer's autocast rounds float32 weights before it computes with them, and to which
            `on_grid` has rounded them before they come here; `None` for none.

    Raises:
        ValueError: As `quantized_layer_names`, `CheckpointForm` and `Smoothing` do.
    """

    grid: torch.dtype | None = None

    def __init__(
        self,
        model: Any,
        scheme: QuantizationScheme | None,
        ignore: Sequence[str] = ("lm_head",),
        smooths: bool = False,
    ) -> None:
        self.scheme = scheme
        self.ignore = tuple(ignore)
        self.form = CheckpointForm(model, splits_experts=scheme is not None)
        self.layers = quantized_layer_names(model, ignore, scheme) if scheme else linear_layer_names(model, ignore)
        self.smoothing = Smoothing(model, self.layers) if smooths else None

    def fit_smoothing(self, model: Any, sequences: Iterable[Sequence[int]]) -> None:
        """Fit the scales, in this process, to what the model computes on some tokens before there are rollouts.

        Args:
            model: The stream's, whole and in memory.
            sequences: Tokens, each a list.
        """
        assert self.smoothing is not None, "a stream that smooths"
        was_training, self.smoothing.collects = model.training, True
        deque(self.smoothing.fold(self.form.tensors(model_parameters(model))), maxlen=0)
        model.eval()
        with torch.inference_mode():
            for tokens in sequences:
                model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False, logits_to_keep=1)
        model.train(was_training)
        self.smoothing.collects = False
        self.smoothing.fit(is_shared=False)

    def keep(self, layers: Iterable[str]) -> None:
        """Leave these layers in full precision from here on."""
        self.ignore += tuple(layers)
        self.layers = self.layers.difference(layers)

    def tensors(
        self,
        named_parameters: NamedTensors,
        observer: Observer | None = None,
        dtype: torch.dtype | None = None,
        is_exact: bool = False,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Turn parameters into tensors, one at a time.

        Args:
            named_parameters: Parameters under their names in the model, without adapters.
            observer: Sees each layer, for measurements.
            dtype: Floating-point type of the tensors that are not quantized; `None` leaves them as they are.
            is_exact: Whether weights are quantized in float32, whatever dtype they are held in.

        Yields:
            `(name, tensor)` pairs in checkpoint format.
        """
        tensors = self.form.tensors(named_parameters)
        if self.smoothing is not None:
            tensors = self.smoothing.fold(tensors)
        exact = exact_weights(tensors, self.layers) if is_exact else tensors
        return quantize_weights(exact, self.scheme, self.layers, observer, dtype)

    def stored(self, parameter: str, dtype: torch.dtype | None = None) -> list[StoredTensor]:
        """What `tensors` yields for one parameter, by its name."""
        held = self.form.held[parameter].items()
        return [
            stored for name, tensor in held for stored in stored_tensors(name, tensor, self.scheme, self.layers, dtype)
        ]

    def nbytes(self, dtype: torch.dtype | None = None) -> int:
        """Bytes of all that `tensors` yields."""
        return sum(stored.nbytes for parameter in self.form.held for stored in self.stored(parameter, dtype))


def on_grid(tensor: torch.Tensor, grid: torch.dtype | None) -> torch.Tensor:
    """What autocast computes with in the place of a matrix in float32, in float32; anything else as it is."""
    return tensor if grid is None or tensor.dim() < 2 or tensor.dtype != torch.float32 else tensor.to(grid).float()


def exact_weights(parameters: NamedTensors, layers: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters with the weights to quantize in float32: whoever holds them, in any dtype, makes the same codes."""
    return ((name, t.float() if name.removesuffix(".weight") in layers else t) for name, t in parameters)


def model_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a model that is whole and in memory, without adapters, for `WeightStream.tensors`."""
    named = itertools.chain(model.named_parameters(), persistent_buffers(model))
    return ((parameter_name(path), tensor.data) for path, tensor in named if ".lora_" not in path)
