"""A model's parameters in, the tensors of its quantized checkpoint out, one layer at a time.

This is all the quantization that happens at each training step. It needs no calibration and holds one layer at a time.
`CheckpointForm` splits and renames parameters, `Smoothing` rescales them, and the scheme rounds and packs each layer.
"""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from trl_qurl.quantization.checkpoint_form import CheckpointForm, NamedTensors, parameter_name, persistent_buffers
from trl_qurl.quantization.layers import linear_layer_names, quantized_layer_names
from trl_qurl.quantization.packing import StoredTensor
from trl_qurl.quantization.scheme import QuantizationScheme
from trl_qurl.quantization.smoothing import Smoothing

Observer = Callable[[str, torch.Tensor, Mapping[str, torch.Tensor]], None]
"""Callback for a layer's name, its weight (out, in), and the tensors it was quantized to, if any."""


def quantize_weights(
    named_tensors: NamedTensors,
    scheme: QuantizationScheme | None,
    layers: Collection[str],
    observer: Observer | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Convert a stream of tensors under their checkpoint names into the tensors of a quantized checkpoint.

    `<layer>.weight` becomes the tensors of the scheme's layout, each under the layer's name; every other tensor passes
    through. The input is not modified.

    Args:
        named_tensors: Tensors under their checkpoint names.
        scheme: Target format; `None` quantizes nothing.
        layers: Names of the layers to quantize, from `quantized_layer_names`.
        observer: Called with each of these layers, for measurements.
        dtype: Floating-point type of the tensors that are not quantized; `None` leaves them as they are. An engine
            would cast them to the same bits, so this only saves bandwidth.

    Yields:
        `(name, tensor)` pairs in checkpoint format.

    Raises:
        ValueError: If the scheme cannot store a layer, or, after the last tensor, if a layer of `layers` is missing.
    """
    missing = set(layers)
    for name, tensor in named_tensors:
        layer = _layer(name, missing)
        if layer is not None:
            missing.remove(layer)
        tensors = {} if scheme is None or layer is None else scheme.quantize(tensor)
        if layer is not None and observer is not None:
            observer(layer, tensor, tensors)
        if tensors:
            yield from ((f"{layer}.{suffix}", part) for suffix, part in tensors.items())
        else:
            yield name, tensor.to(_sent_dtype(tensor.dtype, dtype))
    if missing and scheme is not None:
        raise ValueError(
            f"{len(missing)} of {len(layers)} layers to quantize were not among the tensors, first "
            f"{min(missing)!r}: pass the names that quantized_layer_names() returns for the same model."
        )


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
        deque(self.smoothing.fold(self.form.convert(model_parameters(model))), maxlen=0)
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
        observer: Observer | None = None,
        dtype: torch.dtype | None = None,
        is_exact: bool = False,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Convert parameters to tensors, one at a time.

        Args:
            named_parameters: Parameters under their names in the model, without adapters.
            observer: Called with each layer, for measurements.
            dtype: Floating-point type of the tensors that are not quantized; `None` leaves them as they are.
            is_exact: Whether to quantize in float32, so the codes do not depend on the dtype of the parameters.

        Yields:
            `(name, tensor)` pairs in checkpoint format.
        """
        tensors = self.form.convert(named_parameters)
        if self.smoothing is not None:
            tensors = self.smoothing.fold(tensors)
        if is_exact:
            tensors = ((name, t.float() if _layer(name, self.layers) else t) for name, t in tensors)
        return quantize_weights(tensors, self.scheme, self.layers, observer, dtype)

    def stored(self, parameter: str, dtype: torch.dtype | None = None) -> list[StoredTensor]:
        """Describe the tensors that `tensors` yields for the parameter of this name."""
        result = []
        for name, tensor in self.form.layout[parameter].items():
            layer = _layer(name, self.layers)
            if self.scheme is None or layer is None:
                result.append(StoredTensor(name, _sent_dtype(tensor.dtype, dtype), tensor.shape))
            else:
                parts = self.scheme.layout(tensor.shape, tensor.dtype)
                result += [part._replace(name=f"{layer}.{part.name}") for part in parts]
        return result

    def nbytes(self, dtype: torch.dtype | None = None) -> int:
        """Return the size of everything that `tensors` yields, in bytes."""
        return sum(stored.nbytes for parameter in self.form.layout for stored in self.stored(parameter, dtype))


def on_grid(tensor: torch.Tensor, grid: torch.dtype | None) -> torch.Tensor:
    """Round a float32 matrix to the values that autocast uses, still in float32; return other tensors unchanged."""
    return tensor if grid is None or tensor.dim() < 2 or tensor.dtype != torch.float32 else tensor.to(grid).float()


def model_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a whole model in memory, without adapters, for `WeightStream.tensors`."""
    parameters = itertools.chain(model.named_parameters(), persistent_buffers(model))
    return ((parameter_name(path), tensor.data) for path, tensor in parameters if ".lora_" not in path)


def _layer(name: str, layers: Collection[str]) -> str | None:
    """Return the layer of `layers` to which a weight of this name belongs."""
    layer = name.removesuffix(".weight")
    return layer if layer != name and layer in layers else None


def _sent_dtype(own: torch.dtype, target: torch.dtype | None) -> torch.dtype:
    return own if target is None or not own.is_floating_point else target
