"""Smoothing: the same function with smaller activations, on the way to the engine only.

An INT8 engine rounds all inputs of a layer for one token with one scale, so a few large channels take the range of all
others. Each channel j is divided by s_j where it comes from (the gain of a norm, the rows of a linear layer), and the
columns of the layers that read it are multiplied by s_j:

    s_j = max|X_j|^½ / max|W_j|^½,    x_j → x_j / s_j,    W_ij → W_ij · s_j

Where X_j are the inputs of channel j that the trainer's own forward passes saw, and W_j is column j of all layers that
read it. Source: SmoothQuant, Eq. 4 with α = ½ (arXiv 2211.10438). Two things differ. Each s_j is a power of two, so
that it rounds nothing itself, but in norms that multiply by 1 + weight. And nothing is calibrated beforehand: the
scales are fitted again while the policy trains. Its own weights stay as they are, unlike with update-aware
quantization (`uaq`).
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

LARGEST_EXPONENT = 10
"""Of a scale: no outlier on record needs more, and a float16 engine holds less."""

STAY = 0.75
"""By how many powers of two a scale may be off before it is changed."""

LINEAR_PAIRS = {"self_attn.v_proj": "self_attn.o_proj", "mlp.up_proj": "mlp.down_proj"}
"""Linear layers by the one that scales their inputs channel by channel, in the models of `ARCHITECTURES`: attention
weighs values, and the feed-forward block multiplies `up_proj` by an activation. Fused layers are left alone."""


@dataclass(frozen=True)
class Source:
    """Where some channels come from, and who reads them.

    Attributes:
        name: Module that makes them, a norm or a linear layer.
        layers: Linear layers that read them.
        gain_offset: The norm multiplies by gain_offset + weight; `None` for a linear layer.
        repeats: How often each head's channels are read (grouped queries).
        width: Channels of a head; 1 where there are no heads.
    """

    name: str
    layers: tuple[str, ...]
    gain_offset: float | None
    repeats: int = 1
    width: int = 1

    def spread(self, made: torch.Tensor) -> torch.Tensor:
        """One value per channel that is read, (in,), from one per channel that is made."""
        return made.view(-1, self.width).repeat_interleave(self.repeats, 0).flatten()

    def gather(self, read: torch.Tensor) -> torch.Tensor:
        """The largest value of each channel that is made, from one per channel that is read, (in,)."""
        return read.view(-1, self.repeats, self.width).amax(1).flatten()


class Smoothing:
    """The scales of one model: what they are fitted to, and how they are folded into what an engine is sent.

    Args:
        model: A transformers model, or a PEFT model around one. Hooks on its linear layers see their inputs while
            `collects` is set.
        layers: Names of the layers that are quantized, as a `WeightStream` has them.

    Raises:
        ValueError: The model's type is not among those whose norms and layers are known.
    """

    def __init__(self, model: Any, layers: frozenset[str]) -> None:
        self.collects = False
        self._sources = {source.name: source for source in sources(model) if layers.intersection(source.layers)}
        self._feeder = {layer: source for source in self._sources.values() for layer in source.layers}
        self._inputs: dict[str, torch.Tensor] = {}  # largest magnitudes by source, (in,), since the last fit
        self._columns: dict[str, torch.Tensor] = {}  # largest magnitudes by layer, (in,), when last sent
        self._scales: dict[str, torch.Tensor] = {}  # by source, one per channel that it makes; 1 where it is missing
        readers = {source.layers[0]: name for name, source in self._sources.items()}  # one sees what all of them read
        self._hooks = [
            module.register_forward_pre_hook(self._hook(readers[layer]))
            for layer, module in linear_layers(model, readers.keys())
        ]

    def close(self) -> None:
        """Leave the model alone from here on."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, source: str) -> Any:
        def collect(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if self.collects:
                found = inputs[0].detach().abs().flatten(0, -2).amax(0).float()
                self._inputs[source] = torch.maximum(found, self._inputs.get(source, found))

        return collect

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Collect nothing inside the block."""
        collects, self.collects = self.collects, False
        try:
            yield
        finally:
            self.collects = collects

    @property
    def is_fitted(self) -> bool:
        """Whether there are scales."""
        return bool(self._scales)

    def fit(self) -> bool:
        """Choose the scales anew, from the inputs since the last fit and the weights that were sent last.

        A collective operation: all processes get the same scales.

        Returns:
            Whether there were inputs to fit to.
        """
        found = False
        for name, source in self._sources.items():
            columns = torch.stack([self._columns[layer] for layer in source.layers]).amax(0)
            inputs = _largest_of_all(self._inputs.get(name, torch.zeros_like(columns))).to(columns.device)
            if inputs.any():
                found = True
                before = self._scales.get(name)
                self._scales[name] = fitted_scales(source.gather(inputs), source.gather(columns), before)
        self._inputs.clear()
        return found

    def fold(self, named_tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Fold the scales into tensors of a checkpoint, and take down the magnitudes that the next fit needs.

        Args:
            named_tensors: Tensors in full precision, under their names in the checkpoint. Not modified.

        Yields:
            The same tensors, those of smoothed layers and their sources rescaled.
        """
        for name, tensor in named_tensors:
            module, _, kind = name.rpartition(".")
            scale = self.input_scale(module) if kind == "weight" else None
            if kind == "weight" and module in self._feeder and self.collects:
                self._columns[module] = tensor.detach().abs().amax(0).float()
            if scale is not None:
                tensor = tensor * scale.to(tensor)
            if module in self._scales:
                made, offset = self._scales[module].to(tensor), self._sources[module].gain_offset or 0.0
                tensor = (tensor + offset) / made.view(-1, *[1] * (tensor.dim() - 1)) - offset
            yield name, tensor

    def input_scale(self, layer: str) -> torch.Tensor | None:
        """By what a layer's inputs are divided and its columns multiplied, (in,); `None` for nothing."""
        source = self._feeder.get(layer)
        scale = None if source is None else self._scales.get(source.name)
        return None if source is None or scale is None else source.spread(scale)

    def unfolded(self, layer: str, weight: torch.Tensor) -> torch.Tensor:
        """The policy's own weight of a layer, from one that `fold` has rescaled."""
        scale = self.input_scale(layer)
        weight = weight if scale is None else weight / scale.to(weight)
        return weight * self._scales[layer].to(weight)[:, None] if layer in self._scales else weight


def fitted_scales(inputs: torch.Tensor, columns: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    """Scales that share the range between inputs and weights.

        s_j = 2^round(½ · log₂(max|X_j| / max|W_j|) − m)

    Where m is the mean over channels, so that neither inputs nor weights grow as a whole. A scale that is there stays
    as long as it is less than 2^¾ off: noise in the maxima would change codes at every fit.

    Args:
        inputs: max|X_j| of each channel, (in,).
        columns: max|W_j| of each channel, (in,).
        before: The scales until now, (in,).

    Returns:
        s, (in,); 1 for channels without any input or weight.
    """
    used = (inputs > 0) & (columns > 0)
    exponents = torch.where(used, 0.5 * (inputs / columns).log2(), 0.0)
    mean = exponents.sum() / used.sum().clamp(min=1)
    exponents = (exponents - mean).clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    rounded = exponents.round()
    if before is not None:
        rounded = torch.where((exponents - before.log2()).abs() < STAY, before.log2(), rounded)
    return torch.where(used, rounded, 0.0).exp2()


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
    config = base.config
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"Smoothing does not know which norm feeds which layer in model type {config.model_type!r}. Known: "
            f"{', '.join(ARCHITECTURES)}. Set smoothing_interval=0 to train without it."
        )
    feeds, offset = ARCHITECTURES[config.model_type]
    found = []
    for path, block in base.named_modules():
        if not feeds.keys() <= dict(block.named_children()).keys():
            continue
        inside = {name for name, _ in block.named_modules()}

        def named(name: str, path: str = path) -> str:
            return form.name(parameter_name(f"{path}.{name}"))

        found += [Source(named(norm), tuple(map(named, linears)), offset) for norm, linears in feeds.items()]
        for maker, reader in LINEAR_PAIRS.items():
            if {maker, reader} <= inside:
                heads = _grouped_queries(config) if maker.endswith("v_proj") else {}
                found.append(Source(named(maker), (named(reader),), None, **heads))
    return found


def _grouped_queries(config: Any) -> dict[str, int]:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {"repeats": config.num_attention_heads // config.num_key_value_heads, "width": width}


def _largest_of_all(found: torch.Tensor) -> torch.Tensor:
    """The largest values over all processes."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
    return found
