"""Smoothing: the same function with smaller activations, in what the engine is sent.

An INT8 engine rounds all inputs of a layer for one token with one scale, so a few large channels take the range of all
others. Each channel j is divided by s_j where it comes from (the gain of a norm, the rows of `up_proj`), and the
columns of the layers that read it are multiplied by s_j:

    s_j = (rms X_j)^α / (rms W_j)^(1−α),    x_j → x_j / s_j,    W_ij → W_ij · s_j

X_j are the inputs of channel j that the trainer's own forward passes saw, and W_j is column j of all layers that read
it. Source: SmoothQuant, Eq. 4 (arXiv 2211.10438), with root mean squares for maxima, which need fewer tokens to be
known, and α = 0.4 (docs/mismatch.md compares). The scales are fitted to a few prompts before the engine starts, and to
rollouts while the policy trains. The policy's own weights stay as they are, unlike with update-aware quantization.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trl_qurl.quantization.architectures import ARCHITECTURES
from trl_qurl.quantization.checkpoint_form import CheckpointForm, parameter_name, plain_model
from trl_qurl.quantization.layers import linear_layers
from trl_qurl.quantization.stream import NamedTensors

ALPHA = 0.4
"""How much of the range goes from inputs to weights: 0 none, 1 all."""

FIT_INTERVAL = 16
"""Syncs between two fits."""

LARGEST_SCALE = 2.0**10
"""No outlier on record needs more, and a float16 engine holds less."""

LINEAR_PAIR = ("mlp.up_proj", "mlp.down_proj")
"""A linear layer that scales the inputs of another channel by channel, in the models of `ARCHITECTURES`: the
feed-forward block multiplies `up_proj` by an activation. So do values in attention, but that gained nothing."""


@dataclass(frozen=True)
class Source:
    """Where some channels come from, and who reads them.

    Attributes:
        name: Module that makes them, a norm or a linear layer.
        layers: Linear layers that read them.
        gain_offset: The norm multiplies by gain_offset + weight; 0 for a linear layer.
    """

    name: str
    layers: tuple[str, ...]
    gain_offset: float = 0.0


class Smoothing:
    """The scales of one model: what they are fitted to, and how they are folded into what an engine is sent.

    Args:
        model: A transformers model, or a PEFT model around one. Hooks on its linear layers see their inputs while
            `collects` is set.
        layers: Names of the layers that are quantized, as a `WeightStream` has them.

    Attributes:
        scales: By source, (channels,), in float32.

    Raises:
        ValueError: The model's type is not among those whose norms and layers are known.
    """

    def __init__(self, model: Any, layers: frozenset[str]) -> None:
        self.collects = False
        self._syncs = FIT_INTERVAL - 1  # since the latest fit; the first rollout is worth one
        self.scales: dict[str, torch.Tensor] = {}
        self._sources = {source.name: source for source in sources(model) if layers.intersection(source.layers)}
        self._feeder = {layer: source.name for source in self._sources.values() for layer in source.layers}
        # Sums of squares by channel and, last, the number of squares in each, (channels + 1,).
        self._inputs: dict[str, torch.Tensor] = {}  # by source, since the last fit
        self._columns: dict[str, torch.Tensor] = {}  # by layer, when last sent
        readers = {source.layers[0]: name for name, source in self._sources.items()}  # one sees what all of them read
        self._hooks = [
            module.register_forward_pre_hook(self._hook(readers[layer]))
            for layer, module in linear_layers(model, readers.keys())
        ]
        decoder = plain_model(model).get_decoder()
        self._mask: torch.Tensor | None = None  # of tokens that are no padding, (B, T)
        self._hooks.append(decoder.register_forward_pre_hook(self._see_mask, with_kwargs=True))

    def close(self) -> None:
        """Leave the model alone from here on."""
        for hook in self._hooks:
            hook.remove()

    def _see_mask(self, module: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        self._mask = named.get("attention_mask") if self.collects else None

    def _hook(self, source: str) -> Any:
        def collect(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if self.collects:
                x, mask = inputs[0], self._mask
                x = x[mask.bool()] if mask is not None and mask.shape == x.shape[:-1] else x
                self._inputs[source] = squares(x) + self._inputs.get(source, 0.0)

        return collect

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Collect nothing inside the block."""
        collects, self.collects = self.collects, False
        try:
            yield
        finally:
            self.collects = collects

    def state_dict(self) -> dict[str, Any]:
        """The scales, and what the next fit has seen so far in this process."""
        seen = {"inputs": self._inputs, "columns": self._columns, "collects": self.collects, "syncs": self._syncs}
        return {"scales": self.scales, **seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.scales, self._inputs, self._columns = state["scales"], state["inputs"], state["columns"]
        self.collects, self._syncs = state["collects"], state["syncs"]

    def begin_sync(self) -> None:
        """Fit the scales to the first rollout, and regularly from then on."""
        if self._syncs >= FIT_INTERVAL and self.fit():
            self._syncs = 0
        self._syncs += 1
        self.collects = self._syncs >= FIT_INTERVAL

    def fit(self, is_shared: bool = True) -> bool:
        """Choose the scales anew, from the inputs since the last fit and the weights that were sent last.

        Args:
            is_shared: Whether all processes fit the same scales to what all have seen: a collective operation.

        Returns:
            Whether there were inputs to fit to.
        """
        found = False
        for name, source in self._sources.items():
            columns = torch.stack([self._columns[layer] for layer in source.layers]).sum(0)
            inputs = self._inputs.get(name, torch.zeros_like(columns))
            if is_shared and torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.all_reduce(inputs)
            if inputs[-1] > 0:
                found = True
                self.scales[name] = fitted_scales(inputs[:-1] / inputs[-1], columns.to(inputs)[:-1] / columns[-1])
        self._inputs.clear()
        return found

    def fold(self, named_tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Fold the scales into tensors of a checkpoint, and take down what the next fit needs to know of weights.

        Args:
            named_tensors: Tensors in full precision, under their names in the checkpoint. Not modified.

        Yields:
            The same tensors, those of smoothed layers and their sources rescaled.
        """
        for name, tensor in named_tensors:
            module, _, kind = name.rpartition(".")
            scale = self.input_scale(module) if kind == "weight" else None
            if kind == "weight" and module in self._feeder and self.collects:
                self._columns[module] = squares(tensor)
            folded = tensor
            if scale is not None:
                folded = folded * scale.to(folded.device)
            if module in self.scales:
                made, offset = self.scales[module].to(folded.device), self._sources[module].gain_offset
                folded = (folded + offset) / made.view(-1, *[1] * (folded.dim() - 1)) - offset
            yield name, folded.to(tensor.dtype)  # scales are in float32, so that they round nothing by themselves

    def input_scale(self, layer: str) -> torch.Tensor | None:
        """By what a layer's inputs are divided and its columns multiplied, (in,); `None` for nothing."""
        return self.scales.get(self._feeder.get(layer, ""))

    def unfolded(self, layer: str, weight: torch.Tensor) -> torch.Tensor:
        """The policy's own weight of a layer, from one that `fold` has rescaled."""
        scale = self.input_scale(layer)
        weight = weight if scale is None else weight / scale.to(weight.device)
        return weight * self.scales[layer].to(weight.device)[:, None] if layer in self.scales else weight


def fitted_scales(inputs: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Scales that share the range between inputs and weights, over their geometric mean.

    The mean keeps inputs and weights as large as they are on the whole.

    Args:
        inputs: Mean of X_j² of each channel, (in,).
        columns: Mean of W_j² of each channel, (in,).

    Returns:
        s, (in,), in float32; 1 for channels without any input or weight.
    """
    used = (inputs > 0) & (columns > 0)
    logs = torch.where(used, (ALPHA * inputs.float().log() - (1 - ALPHA) * columns.float().log()) / 2, 0.0)
    mean = logs.sum() / used.sum().clamp(min=1)
    scales = (logs - mean).exp().clamp(1 / LARGEST_SCALE, LARGEST_SCALE)
    return torch.where(used, scales, 1.0)


def squares(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of squares over all but the last dimension and, last, the number of terms, (channels + 1,), in float32."""
    rows = tensor.detach().flatten(0, -2)
    return torch.cat([rows.float().square().sum(0), rows.new_tensor([len(rows)], dtype=torch.float32)])


def can_smooth(model: Any) -> bool:
    """Whether it is known which norm feeds which layer in a model."""
    return plain_model(model).config.model_type in ARCHITECTURES


def sources(model: Any) -> list[Source]:
    """Name the modules whose outputs can be rescaled, in the order of the model.

    Args:
        model: A transformers model, or a PEFT model around one.

    Returns:
        Sources under their names in the checkpoint. Where no norm or linear layer precedes a layer, there is none.

    Raises:
        ValueError: The model's type is not in `ARCHITECTURES`.
    """
    base, form = plain_model(model), CheckpointForm(model)
    if not can_smooth(model):
        raise ValueError(
            f"Smoothing does not know which norm feeds which layer in model type {base.config.model_type!r}. Known: "
            f"{', '.join(ARCHITECTURES)}. Leave smooth_activations out, or set it to False."
        )
    feeds, offset = ARCHITECTURES[base.config.model_type]
    found = []
    for path, block in base.named_modules():
        if not feeds.keys() <= dict(block.named_children()).keys():
            continue
        inside = {name for name, _ in block.named_modules()}

        def named(name: str, path: str = path) -> str:
            return form.name(parameter_name(f"{path}.{name}"))

        found += [Source(named(norm), tuple(map(named, linears)), offset) for norm, linears in feeds.items()]
        if inside.issuperset(LINEAR_PAIR):  # fused layers are left alone
            maker, reader = map(named, LINEAR_PAIR)
            found.append(Source(maker, (reader,)))
    return found
