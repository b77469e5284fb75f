"""The quantized policy's forward pass, computed by the trainer: what the engine should say.

Layers round their weights and inputs as the scheme says and multiply in the trainer's own dtype. The gradient passes
straight through the rounding, to the weights in full precision. The probe checks the engine with such a pass; with
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

    An existing layer becomes one by its class alone (`quantize_layers`): its parameters, their names and whatever
    wraps it stay as they are.
    """

    scheme: QuantizationScheme
    rounds_inputs = True  # whether the engine's kernels do
    exact_class: ClassVar[type[nn.Linear]] = nn.Linear  # what the layer was
    is_rounded = False  # whether its weight is rounded already (`rounded_base`)
    companions: tuple[nn.Linear, ...] = ()  # layers that share a scale with it
    grid: torch.dtype | None = None  # that the engine's codes were made from (`WeightStream.grid`)
    input_scale: torch.Tensor | None = None  # by what the engine's inputs are smaller and its columns larger, (in,)
    _keeps = False
    _kept: tuple[Any, torch.Tensor] | None = None  # the rounded weight, and what it was made from
    _fingerprints: list[int] | None = None  # of what the kept one was made from

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply rounded inputs with rounded weights, in the dtype in which the layer would multiply exact ones."""
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        x = input.to(dtype)  # the engine rounds what has its own dtype, too
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
        """The weights that the rounded one is made from: its own first, then those that share a scale with it."""
        return [self.weight, *(layer.weight for layer in self.companions)]

    @property
    def is_whole(self) -> bool:
        """Whether the weight is not in parts between passes, as FSDP and ZeRO-3 leave it, or a view of one."""
        weight = self.weight
        is_parameter = isinstance(weight, nn.Parameter) and weight.shape == (self.out_features, self.in_features)
        return is_parameter and not isinstance(weight, DTensor)

    def round_again(self) -> None:
        """Forget the rounded weight, and keep the next one between passes if the weight is whole."""
        self._kept, self._keeps = None, self.is_whole

    def rounded_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """What the engine's codes stand for (out, in), in a dtype; kept if `round_again` said so."""
        if self.is_rounded:
            return self.weight.to(dtype)
        weights = self.sources
        source = (dtype, *((weight.data_ptr(), weight._version) for weight in weights))
        if self._kept is not None and self._kept[0] == source:
            return self._kept[1]
        with torch.inference_mode(False), torch.no_grad():
            weights = [weight if self.grid is None else weight.to(self.grid).to(weight.dtype) for weight in weights]
            if self.input_scale is not None:
                weights[0] = (weights[0] * self.input_scale.to(weights[0].device)).to(weights[0].dtype)
            tensors = self.scheme.in_engine(self.scheme.quantize(weights[0], weights[1:]), dtype)
            rounded = self.scheme.dequantize(tensors).to(dtype)
        self._kept = (source, rounded) if self._keeps else None
        return rounded


def forget_outdated(module: nn.Module, inputs: Any = None) -> None:
    """Forget rounded weights below a module if the exact ones have changed, by whatever means. A forward pre-hook.

    Torch does not count every change (`weight.data`, kernels behind pointers), so fingerprints are compared. They read
    each weight once; rounding reads and writes it several times.
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
    """The sum of a weight's bits, read as 64-bit integers, (): it differs after any change but a contrived one."""
    weight, width = weight.detach(), 8 // weight.element_size()
    if not weight.is_contiguous() or weight.shape[-1] % width or weight.storage_offset() % width:
        weight = weight.double()
    return weight.contiguous().view(torch.int64).sum()


class StraightThrough(torch.autograd.Function):
    """Has the value of its second argument, and hands its gradient to the first."""

    @staticmethod
    def forward(ctx: Any, exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return rounded.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: D102
        return gradient, None


def quantize_layers(model: nn.Module, layers: Collection[str], scheme: QuantizationScheme) -> list[QuantizedLinear]:
    """Let the named linear layers compute with rounded weights and inputs from here on; return those that did not."""
    named: dict[str, Any] = dict(linear_layers(model, layers))
    changed: list[Any] = []
    for name, layer in named.items():
        if isinstance(layer, QuantizedLinear):
            continue
        changed.append(layer)
        layer.companions = tuple(named[other] for other in scheme.companions(name, layers))
        kind = type(layer)
        layer.__class__ = (
            QuantizedLinear
            if kind is nn.Linear
            else type(f"Quantized{kind.__name__}", (QuantizedLinear, kind), {"exact_class": kind})
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
    """Let the named linear layers and experts compute so inside the block, smoothed and on a grid if the engine is."""
    changed: list[Any] = list(quantize_layers(model, layers, scheme))
    adapted = [(name, cast(QuantizedLinear, layer)) for name, layer in linear_layers(model, layers)]
    for name, layer in adapted:
        layer.input_scale, layer.grid = smoothing.input_scale(name) if smoothing else None, grid
    try:
        with quantized_experts(model, layers, scheme):
            yield
    finally:
        for _, layer in adapted:
            layer.input_scale = layer.grid = None
        for layer in changed:
            layer.__class__ = layer.exact_class


@contextmanager
def exact_forward(model: nn.Module) -> Iterator[None]:
    """Let all linear layers compute with exact weights and inputs inside the block."""
    kinds: list[tuple[Any, Any]] = [
        (module, type(module)) for module in model.modules() if isinstance(module, QuantizedLinear)
    ]
    for layer, kind in kinds:
        layer.__class__ = kind.exact_class
    try:
        yield
    finally:
        for layer, kind in kinds:
            layer.__class__ = kind
