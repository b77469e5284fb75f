"""Conversion of a model's parameters to the tensors of its quantized checkpoint.

`checkpoint_form` splits and renames tensors, `layers` selects what to quantize, and `stream` quantizes.
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
from trl_qurl.quantization.stream import NamedTensors, quantize_weights, stored_tensors


class WeightStream:
    """Reusable converter from a model's parameters to the tensors of its checkpoint.

    Args:
        model: A transformers model, or a PEFT model around one.
        scheme: Target format; `None` quantizes nothing.
        ignore: Modules kept in full precision, as for `quantized_layer_names`.
        smooths: Whether to fold `smoothing` into the weights.

    Attributes:
        grid: Dtype to which the trainer's autocast rounds float32 weights before it computes with them. `on_grid` has
            already rounded the parameters to it. `None` for none.

    Raises:
        ValueError: As for `quantized_layer_names`, `CheckpointForm` and `Smoothing`.
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
        """Fit the scales to a few sequences before there are rollouts, in this process only.

        Args:
            model: The stream's model, whole and in memory.
            sequences: Token IDs of each sequence.
        """
        assert self.smoothing is not None, "the stream must smooth"
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
        """Keep these layers in full precision from now on."""
        self.ignore += tuple(layers)
        self.layers = self.layers.difference(layers)

    def tensors(
        self,
        named_parameters: NamedTensors,
        dtype: torch.dtype | None = None,
        is_exact: bool = False,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Convert parameters to tensors, one at a time.

        Args:
            named_parameters: Parameters under their names in the model, without adapters.
            dtype: Floating-point type of the tensors that are not quantized; `None` leaves them as they are.
            is_exact: Whether to quantize weights in float32, regardless of their dtype.

        Yields:
            `(name, tensor)` pairs in checkpoint format.
        """
        tensors = self.form.tensors(named_parameters)
        if self.smoothing is not None:
            tensors = self.smoothing.fold(tensors)
        exact = exact_weights(tensors, self.layers) if is_exact else tensors
        return quantize_weights(exact, self.scheme, self.layers, dtype)

    def stored(self, parameter: str, dtype: torch.dtype | None = None) -> list[StoredTensor]:
        """Describe the tensors that `tensors` yields for the parameter of this name."""
        return [
            stored
            for name, tensor in self.form.layout[parameter].items()
            for stored in stored_tensors(name, tensor, self.scheme, self.layers, dtype)
        ]

    def nbytes(self, dtype: torch.dtype | None = None) -> int:
        """Return the size of everything that `tensors` yields, in bytes."""
        return sum(stored.nbytes for parameter in self.form.layout for stored in self.stored(parameter, dtype))


def on_grid(tensor: torch.Tensor, grid: torch.dtype | None) -> torch.Tensor:
    """Round a float32 matrix to the values that autocast uses, still in float32; return other tensors unchanged."""
    return tensor if grid is None or tensor.dim() < 2 or tensor.dtype != torch.float32 else tensor.to(grid).float()


def exact_weights(parameters: NamedTensors, layers: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Convert the weights to quantize to float32, so the codes do not depend on the dtype of the parameters."""
    return ((name, t.float() if name.removesuffix(".weight") in layers else t) for name, t in parameters)


def model_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a whole model in memory, without adapters, for `WeightStream.tensors`."""
    parameters = itertools.chain(model.named_parameters(), persistent_buffers(model))
    return ((parameter_name(path), tensor.data) for path, tensor in parameters if ".lora_" not in path)
