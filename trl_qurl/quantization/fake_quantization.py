"""The quantized policy's forward pass in the trainer, which the engine should reproduce.

Layers round their weights and inputs by the scheme and multiply in the trainer's own dtype. The gradient passes
straight through the rounding to the full-precision weights. The probe checks the engine against this pass; with
`training_forward="quantized"` the policy trains in it.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trl_qurl.quantization.fake_experts import quantized_experts
from trl_qurl.quantization.formats import gpu_capability
from trl_qurl.quantization.layers import linear_layers
from trl_qurl.quantization.scheme import QuantizationScheme
from trl_qurl.quantization.smoothing import Smoothing


class QuantizedLinear(nn.Linear):
    """[`torch.nn.Linear`] that computes with rounded weights and inputs.

    An existing layer only changes its class (`quantize_layers`): its parameters, their names and its wrappers stay as
    they are.
    """

    scheme: QuantizationScheme
    rounds_inputs = True  # whether the engine's kernels round them
    exact_class: ClassVar[type[nn.Linear]] = nn.Linear  # the layer's original class
    is_rounded = False  # whether the weight is already rounded (`rounded_base`)
    companions: tuple[nn.Linear, ...] = ()  # layers that share a scale with this one
    grid: torch.dtype | None = None  # source dtype of the engine's codes (`WeightStream.grid`)
    input_scale: torch.Tensor | None = None  # smoothing: divides inputs and multiplies columns, (in,)
    _caches_weight = False
    _cached_weight: tuple[Any, torch.Tensor] | None = None  # key of its sources, and the rounded weight
    _fingerprints: list[int] | None = None  # of the sources of the cached weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply rounded inputs with rounded weights, in the dtype that the exact layer would use."""
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        x = input.to(dtype)  # the engine also rounds inputs in its compute dtype
        weight = self.weight
        if self.input_scale is not None:
            scale = self.input_scale.to(x.device)
            x, weight = (x / scale).to(x.dtype), (weight * scale).to(weight.dtype)
        if self.rounds_inputs:
            x = StraightThrough.apply(x, self.scheme.quantize_activations(x.detach()))
        weight = StraightThrough.apply(weight, self.rounded_weight(dtype))
        return nn.functional.linear(x, weight, None if self.bias is None else self.bias.to(dtype))

    @property
    def sources(self) -> list[torch.Tensor]:
        """Weights that determine the rounded one: the layer's own first, then the ones that share its scale."""
        return [self.weight, *(layer.weight for layer in self.companions)]

    @property
    def is_whole(self) -> bool:
        """Whether the weight is a whole parameter between passes, neither a shard (FSDP, ZeRO-3) nor a view."""
        weight = self.weight
        is_parameter = isinstance(weight, nn.Parameter) and weight.shape == (self.out_features, self.in_features)
        return is_parameter and not isinstance(weight, DTensor)

    def round_again(self) -> None:
        """Invalidate the cached rounded weight, and cache the next one if the weight is whole."""
        self._cached_weight, self._caches_weight = None, self.is_whole

    def rounded_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight that the engine's codes represent, (out, in); cached if `round_again` enabled that."""
        if self.is_rounded:
            return self.weight.to(dtype)
        weights = self.sources
        key = (dtype, *((weight.data_ptr(), weight._version) for weight in weights))
        if self._cached_weight is not None and self._cached_weight[0] == key:
            return self._cached_weight[1]
        with torch.inference_mode(False), torch.no_grad():
            weights = [weight if self.grid is None else weight.to(self.grid).to(weight.dtype) for weight in weights]
            if self.input_scale is not None:
                weights[0] = (weights[0] * self.input_scale.to(weights[0].device)).to(weights[0].dtype)
            tensors = self.scheme.in_engine(self.scheme.quantize(weights[0], weights[1:]), dtype)
            rounded = self.scheme.dequantize(tensors).to(dtype)
        self._cached_weight = (key, rounded) if self._caches_weight else None
        return rounded


def forget_outdated(module: nn.Module, inputs: Any = None) -> None:
    """Invalidate cached rounded weights below a module if the exact ones have changed. A forward pre-hook.

    Torch's version counter misses some changes (`weight.data`, kernels behind pointers), so compare fingerprints. They
    read each weight once; rounding reads and writes it several times.
    """
    quantized = (layer for layer in module.modules() if isinstance(layer, QuantizedLinear))
    layers = [layer for layer in quantized if layer.is_whole and not layer.is_rounded]
    sums = [[fingerprint(weight) for weight in layer.sources] for layer in layers]
    for layer, tensors in zip(layers, sums, strict=True):
        fingerprints = [int(tensor) for tensor in tensors]
        if fingerprints != layer._fingerprints:
            layer._fingerprints = fingerprints
            layer.round_again()


def fingerprint(weight: torch.Tensor) -> torch.Tensor:
    """Sum a weight's bits as 64-bit integers, (). The sum differs after any change but a contrived one."""
    weight, width = weight.detach(), 8 // weight.element_size()
    if not weight.is_contiguous() or weight.shape[-1] % width or weight.storage_offset() % width:
        weight = weight.double()
    return weight.contiguous().view(torch.int64).sum()


class StraightThrough(torch.autograd.Function):
    """Straight-through estimator: the value of `rounded`, with the gradient going to `exact`."""

    @staticmethod
    def forward(ctx: Any, exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return rounded.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: D102
        return gradient, None


def quantize_layers(model: nn.Module, layers: Collection[str], scheme: QuantizationScheme) -> list[QuantizedLinear]:
    """Switch linear layers to rounded weights and inputs; return the ones that were not switched before."""
    modules: dict[str, Any] = dict(linear_layers(model, layers))
    changed: list[Any] = []
    for name, layer in modules.items():
        if isinstance(layer, QuantizedLinear):
            continue
        changed.append(layer)
        layer.companions = tuple(modules[other] for other in scheme.companions(name, layers))
        cls = type(layer)
        layer.__class__ = (
            QuantizedLinear
            if cls is nn.Linear
            else type(f"Quantized{cls.__name__}", (QuantizedLinear, cls), {"exact_class": cls})
        )
        layer.scheme, layer.rounds_inputs = scheme, scheme.rounds_activations(gpu_capability())
    return changed


@contextmanager
def quantized_forward(
    model: nn.Module,
    layers: Collection[str],
    scheme: QuantizationScheme,
    smoothing: Smoothing | None = None,
    grid: torch.dtype | None = None,
) -> Iterator[None]:
    """Run linear layers and experts quantized inside the context, with the engine's smoothing and grid, if any."""
    changed: list[Any] = list(quantize_layers(model, layers, scheme))
    quantized = [(name, cast(QuantizedLinear, layer)) for name, layer in linear_layers(model, layers)]
    for name, layer in quantized:
        layer.input_scale, layer.grid = smoothing.input_scale(name) if smoothing else None, grid
    try:
        with quantized_experts(model, layers, scheme):
            yield
    finally:
        for _, layer in quantized:
            layer.input_scale = layer.grid = None
        for layer in changed:
            layer.__class__ = layer.exact_class


@contextmanager
def exact_forward(model: nn.Module) -> Iterator[None]:
    """Run all linear layers with exact weights and inputs inside the context."""
    classes: list[tuple[Any, Any]] = [
        (module, type(module)) for module in model.modules() if isinstance(module, QuantizedLinear)
    ]
    for layer, cls in classes:
        layer.__class__ = cls.exact_class
    try:
        yield
    finally:
        for layer, cls in classes:
            layer.__class__ = cls
