"""Smoothing, applied to the weights sent to the engine: the same function with smaller activations.

An INT8 engine rounds all inputs of a layer for one token with one scale, so a few large channels
use up the range of all others. Each channel j is divided by s_j at its source (the gain of a norm,
the rows of `up_proj`), and the columns of the layers that read it are multiplied by s_j:

    s_j = (rms X_j)^α / (rms W_j)^(1−α),    x_j → x_j / s_j,    W_ij → W_ij · s_j

X_j are the inputs of channel j in the trainer's own forward passes, and W_j is column j of all
layers that read it. Source: SmoothQuant, Eq. 4 (arXiv 2211.10438), with root mean squares instead
of maxima, because they need fewer tokens to estimate, and α = 0.4 (benchmarks/int8.md compares
values). Unlike in UAQ, the policy's own weights do not change.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from trl_qurl.quantization.architectures import ARCHITECTURES, decoder_layers
from trl_qurl.quantization.checkpoint_form import CheckpointForm, NamedTensors, plain_model
from trl_qurl.quantization.layers import linear_layers

ALPHA = 0.4  # share of the range that moves from inputs to weights: 0 for none, 1 for all
FIT_INTERVAL = 16  # syncs between fits
STATE = ("scales", "_inputs", "_columns", "collects", "_syncs")  # attributes for a checkpoint
# Known outliers need less, and larger scales would not fit into a float16 engine.
LARGEST_SCALE = 2.0**10

LINEAR_PAIR = ("mlp.up_proj", "mlp.down_proj")
"""A linear layer that scales the inputs of another channel by channel, in the models of
`ARCHITECTURES`: the feed-forward block multiplies `up_proj` by an activation. Values in attention
do the same, but smoothing them gained nothing."""


class Source(NamedTuple):
    """Source of some channels, a norm or a linear layer."""

    layers: tuple[str, ...]  # linear layers that read its channels
    gain_offset: float  # a norm multiplies by gain_offset + weight


class Smoothing:
    """Smoothing scales of the quantized `layers` of a model.

    It fits them, and folds them into what an engine is sent. Raises `ValueError` if the model's
    type is not in `ARCHITECTURES`.
    """

    def __init__(self, model: Any, layers: frozenset[str]) -> None:
        self.collects = False  # whether statistics for the next fit are due
        self._watches = False  # whether the forward pass that runs is one to collect inputs from
        self._syncs = FIT_INTERVAL - 1  # since the last fit; fit again after the first rollout
        self.scales: dict[str, torch.Tensor] = {}  # by source, (channels,), in float32
        self._sources = {
            name: each for name, each in sources(model).items() if layers.intersection(each.layers)
        }
        self._feeder = {
            layer: name for name, source in self._sources.items() for layer in source.layers
        }
        # Sums of squares by channel and, last, the number of squares in each, (channels + 1,).
        self._inputs: dict[str, torch.Tensor] = {}  # by source, since the last fit
        self._columns: dict[str, torch.Tensor] = {}  # by layer, as last sent
        # One layer of each source is enough, because its layers share one input.
        readers = {source.layers[0]: name for name, source in self._sources.items()}
        for layer, module in linear_layers(model, readers.keys()):
            module.register_forward_pre_hook(partial(self._record_inputs, readers[layer]))
        self._mask: torch.Tensor | None = None  # true on tokens that are not padding, (B, T)
        plain_model(model).get_decoder().register_forward_pre_hook(
            self._record_mask, with_kwargs=True
        )

    def _record_mask(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._mask = kwargs.get("attention_mask") if self._watches else None

    def _record_inputs(
        self, source: str, module: nn.Module, inputs: tuple[torch.Tensor, ...]
    ) -> None:
        if not self.collects or not self._watches:
            return
        x = inputs[0].detach()
        if self._mask is not None and self._mask.shape == x.shape[:-1]:
            x = x[self._mask.bool()]
        self._inputs[source] = squares(x) + self._inputs.get(source, 0.0)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Collect the inputs of forward passes inside the block, if statistics are due."""
        self._watches = True
        try:
            yield
        finally:
            self._watches = False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Collect nothing inside the block: the next fit needs the weights of the last sync."""
        collects = self.collects
        self.collects = False
        try:
            yield
        finally:
            self.collects = collects

    def state_dict(self) -> dict[str, Any]:
        """Return the scales, and this process's statistics for the next fit."""
        return {
            "layers": list(self._feeder),
            "values": {name: getattr(self, name) for name in STATE},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`.

        If other layers are smoothed now, keep the fit to the first prompts.
        """
        if state["layers"] == list(self._feeder):
            vars(self).update(state["values"])

    def begin_sync(self) -> None:
        """Fit the scales to the first rollout, and regularly from then on."""
        if self._syncs >= FIT_INTERVAL and self.fit():
            self._syncs = 0
        self._syncs += 1
        self.collects = self._syncs >= FIT_INTERVAL

    def fit(self, is_shared: bool = True) -> bool:
        """Refit the scales to the inputs since the last fit and the weights as last sent.

        If `is_shared`, all processes fit the same scales to the inputs of all; this is a collective
        operation. Returns `False` without inputs.
        """
        sums = is_shared and torch.distributed.is_available() and torch.distributed.is_initialized()
        has_inputs = False
        for name, source in self._sources.items():
            columns = torch.stack([self._columns[layer] for layer in source.layers]).sum(0)
            inputs = self._inputs.get(name, torch.zeros_like(columns))
            if sums:
                torch.distributed.all_reduce(inputs)
            if inputs[-1] > 0:
                has_inputs = True
                self.scales[name] = fitted_scales(inputs[:-1], columns.to(inputs)[:-1])
        self._inputs.clear()
        return has_inputs

    def fold(self, named_tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Fold the scales into tensors of a checkpoint, and record magnitudes for the next fit.

        Yields the same full-precision tensors, but smoothed layers and their sources are rescaled
        copies.
        """
        for name, tensor in named_tensors:
            module, _, attribute = name.rpartition(".")
            folded = tensor
            if attribute == "weight":
                if module in self._feeder and self.collects:
                    self._columns[module] = squares(tensor)
                scale = self.input_scale(module)
                if scale is not None:
                    folded = folded * scale.to(folded.device)
            if module in self.scales:
                divisor = self.scales[module].to(folded.device)
                if folded.dim() == 2:  # the rows of a linear layer
                    divisor = divisor[:, None]
                offset = self._sources[module].gain_offset
                if offset:
                    folded = (folded + offset) / divisor - offset
                else:
                    folded = folded / divisor
            yield name, folded.to(tensor.dtype)  # scales are in float32, so only this cast rounds

    def input_scale(self, layer: str) -> torch.Tensor | None:
        """Return the scale that divides a layer's inputs and multiplies its columns, (in,).

        `None` if the layer is not smoothed.
        """
        return self.scales.get(self._feeder.get(layer, ""))


def fitted_scales(inputs: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Compute s from the sums of X_j² and W_j², all (in,); for means, it would be the same.

    Division by the geometric mean keeps the overall magnitude of inputs and weights. s is 1 for
    channels with only zeros as inputs or weights.
    """
    used = (inputs > 0) & (columns > 0)
    log_inputs = inputs.float().log()
    log_columns = columns.float().log()
    # Half, because both are squares.
    logs = torch.where(used, (ALPHA * log_inputs - (1 - ALPHA) * log_columns) / 2, 0.0)
    mean = logs.sum() / used.sum().clamp(min=1)
    scales = (logs - mean).exp().clamp(1 / LARGEST_SCALE, LARGEST_SCALE)
    return torch.where(used, scales, 1.0)


def squares(tensor: torch.Tensor) -> torch.Tensor:
    """Sum squares over all but the last dimension, then append the number of terms.

    Returns (channels + 1,), in float32.
    """
    rows = tensor.detach().flatten(0, -2)
    count = rows.new_tensor([len(rows)], dtype=torch.float32)
    return torch.cat([rows.float().square().sum(0), count])


def can_smooth(model: nn.Module) -> bool:
    """Return whether `ARCHITECTURES` lists which norm feeds which layer in a model."""
    return plain_model(model).config.model_type in ARCHITECTURES


def sources(model: Any) -> dict[str, Source]:
    """Return the modules with outputs that can be rescaled, in model order.

    They are named as in the checkpoint. Raises `ValueError` for model types that are not in
    `ARCHITECTURES`.
    """
    form = CheckpointForm(model)
    way_out = "Leave smooth_activations out, or set it to False."
    (feeds, offset), blocks = decoder_layers(plain_model(model), "Smoothing", way_out)
    up_proj, down_proj = LINEAR_PAIR
    result = {}
    for path, block in blocks.items():
        for norm, linears in feeds.items():
            layers = tuple(form.name(f"{path}.{linear}") for linear in linears)
            result[form.name(f"{path}.{norm}")] = Source(layers, offset)
        modules = dict(block.named_modules())
        if up_proj in modules and down_proj in modules:  # not with fused layers
            layers = (form.name(f"{path}.{down_proj}"),)
            result[form.name(f"{path}.{up_proj}")] = Source(layers, gain_offset=0.0)
    return result
