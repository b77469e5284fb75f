"""Choose finer formats for some layers, so that the engine stays below a KL.

Layers are ranked by estimates of the KL that each causes, from a few tokens. For a small change δ
of a layer's output, KL(exact ‖ changed) is ½ δᵀFδ, where F is the Fisher information: the mean of g
gᵀ over tokens y that the model itself samples, with g the gradient of log p(y) at that output. A
layer's δ is the change of its exact output when its weight and inputs are rounded; (g·δ)² is summed
token by token. One forward pass and a few backward passes therefore rank all layers. The estimate
ignores how errors of several tokens or layers combine: on SmolLM2-135M the sum of the estimates was
1.4 times the KL.

A real engine measures the result. Finer formats cannot remove the KL of the kernels, so the KL of a
16-bit engine is subtracted from the limit first. The rest is rescaled by how well the estimates
explain the engine's KL.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from trl_qurl.lab.comparison import BASELINE
from trl_qurl.lab.fake_quantization import QuantizedLinear
from trl_qurl.lab.mismatch.report import Choice, Report, Step
from trl_qurl.lab.mismatch.statistics import Mismatch
from trl_qurl.quantization.checks.shapes import storage_obstacle
from trl_qurl.quantization.formats import SCHEMES
from trl_qurl.quantization.layers import REST, fused_groups, linear_layers
from trl_qurl.quantization.scheme import QuantizationScheme
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.rollout.checks.hardware import available_formats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trl_qurl.lab.mismatch.engines import Engines

ROUNDS = 3
"""Maximum number of choices to try with an engine."""

FINER = "w8a16"
"""Format to try before 16 bits, where it runs: exact activations for a few bytes of scales."""

DRAWS = 4  # tokens to sample at each position
MOST_TOKENS = 512

LayerFormat = tuple[str, QuantizationScheme]
"""A layer's name, and a format that it may have."""


def choose_finer(
    engines: Engines, scheme: str, report: Report, limit: float
) -> tuple[Choice, Mismatch]:
    """Choose layers for finer formats than `scheme`, and measure an engine with that choice.

    `report` has measurements of a 16-bit engine and of one with all layers in `scheme`, and `limit`
    is in nats per token. Raises `ValueError` if even a 16-bit engine exceeds it, or all layers
    would have to be in 16 bits.
    """
    reached = report.formats[scheme].kl_k3.value
    kernels = report.by_kernels
    if kernels >= limit:
        raise ValueError(
            f"--kl {limit:g} is out of reach: even a 16-bit engine has a KL of {kernels:.2g}, "
            "whichever layers are kept. Raise --kl."
        )
    engines.say("Estimating the KL that each layer causes")
    finer = []
    if scheme != FINER and FINER in available_formats():
        finer = [SCHEMES[FINER]]
    steps = find_steps(engines.policy, engines.weights(scheme), engines.prompts, finer)
    taken: list[Step] = []
    allowed = limit
    for _ in range(ROUNDS):
        # Calibrate: the estimates of the steps not taken sum to the KL that the engine shows beyond
        # its kernels.
        remaining = sum(step.kl for step in steps[len(taken) :])
        budget = remaining * (allowed - kernels) / max(reached - kernels, 1e-12)
        taken = within_kl(steps, budget)
        if len(taken) == len(steps):
            raise ValueError(
                f"A KL below {allowed:.2g} would require all layers in 16 bits: raise --kl or "
                "choose a finer format."
            )
        formats: dict[str, str] = {}
        for step in taken:
            formats |= dict.fromkeys(step.layers, step.format)
        name = f"{scheme}, {len(formats)} finer"
        formats[REST] = scheme
        mismatch = engines.measure(formats)
        reached = mismatch.kl_k3.value
        if reached <= limit:
            break
        # Leave a margin: the next measurement is noisy, too.
        allowed = kernels + 0.9 * (limit - kernels)
    return Choice(name, formats, len(taken), tuple(steps), limit), mismatch


def within_kl(steps: Sequence[Step], budget: float) -> list[Step]:
    """Choose the shortest prefix of the steps after which at most `budget` remains."""
    taken = 0
    remaining = sum(step.kl for step in steps)
    while taken < len(steps) and remaining > budget:
        remaining -= steps[taken].kl
        taken += 1
    return list(steps[:taken])


def find_steps(
    model: PreTrainedModel,
    weights: WeightStream,
    sequences: Iterable[Sequence[int]],
    finer: Sequence[QuantizationScheme] = (),
) -> list[Step]:
    """Return steps that lower the KL, most KL per byte first.

    Each group of layers has one to 16 bits, and may have one to a `finer` format before. The
    stream's `model` must be whole, in memory and in evaluation mode. Experts are left out. Of the
    tokens in `sequences` (prompts or answers), the first `MOST_TOKENS` are used.
    """
    schemes = weights.plan.schemes
    halves: dict[str, Tensor] = {}
    for tensors in weights.form.layout.values():
        for name, tensor in tensors.items():
            halves[name.removesuffix(".weight")] = tensor.to(torch.bfloat16)
    groups = fused_groups(schemes)
    formats: dict[str, list[QuantizationScheme]] = {}
    for group in groups:
        shapes = [halves[layer].shape for layer in group]
        fitting = [scheme for scheme in finer if can_store(scheme, shapes)]
        formats |= dict.fromkeys(group, [schemes[group[0]], *fitting])
    kls = estimate_kl(model, weights, sequences, formats)
    steps: list[Step] = []
    for group in groups:
        steps += steps_of_group(group, formats[group[0]], halves, kls)
    return sorted(steps, key=worth, reverse=True)


def can_store(scheme: QuantizationScheme, shapes: Iterable[Sequence[int]]) -> bool:
    """Return whether a format can store weights of these shapes."""
    args = scheme.library_scheme.weights
    return all(storage_obstacle(args, shape) is None for shape in shapes)


def steps_of_group(
    group: tuple[str, ...],
    formats: Sequence[QuantizationScheme],
    halves: Mapping[str, Tensor],
    kls: Mapping[LayerFormat, float],
) -> list[Step]:
    """Return the step of a group from the first of its formats to 16 bits, or two if that pays."""

    def step(old: QuantizationScheme, new: QuantizationScheme | None) -> Step:
        kl = 0.0
        extra = 0
        for layer in group:
            kl += kls[layer, old] - (kls[layer, new] if new else 0.0)
            extra += stored_bytes(halves[layer], new) - stored_bytes(halves[layer], old)
        return Step(group, new.name if new else BASELINE, kl, extra)

    first, *finer = formats
    steps = [step(first, None)]
    for scheme in finer:
        if worth(step(first, scheme)) > worth(steps[0]):
            steps = [step(first, scheme), step(scheme, None)]
    return steps


def worth(step: Step) -> float:
    """Return the KL that a step removes per byte."""
    return step.kl / max(step.extra_bytes, 1)


def stored_bytes(weight: Tensor, scheme: QuantizationScheme | None) -> int:
    """Return the size of a layer in a checkpoint, with `None` unchanged."""
    if scheme is None:
        return weight.nbytes
    return sum(part.nbytes for part in scheme.layout(weight).values())


class _Rounding(NamedTuple):
    """A layer in one forward pass, and what rounding it alone would change."""

    rounded: LayerFormat
    output: Tensor  # exact, (1, T, D)
    error: Tensor  # of the rounded output, (1, T, D)


def estimate_kl(
    model: PreTrainedModel,
    weights: WeightStream,
    sequences: Iterable[Sequence[int]],
    formats: Mapping[str, Sequence[QuantizationScheme]],
) -> Mapping[LayerFormat, float]:
    """Estimate the KL, in nats per token, of each layer in each of its formats, rounded alone.

    See `find_steps` for the arguments.
    """
    smoothing = weights.smoothing
    roundings: list[_Rounding] = []  # of one pass

    def round_alone(
        name: str, layer: torch.nn.Linear, inputs: tuple[Tensor, ...], output: Tensor
    ) -> None:
        for scheme in formats[name]:
            scale = None
            if smoothing and scheme.is_smoothed:
                scale = smoothing.input_scale(name)
            error = QuantizedLinear(layer, scheme, scale)(inputs[0]) - output.detach()
            roundings.append(_Rounding((name, scheme), output.requires_grad_(), error))

    hooks = [
        layer.register_forward_hook(partial(round_alone, name))
        for name, layer in linear_layers(model, formats)
    ]
    sums: defaultdict[LayerFormat, float] = defaultdict(float)  # over tokens
    generator = torch.Generator(model.device).manual_seed(0)
    count = 0
    for tokens in sequences:
        tokens = tokens[: MOST_TOKENS - count]
        if not tokens:
            continue
        roundings.clear()
        output = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False)
        logps = output.logits[0].float().log_softmax(-1)  # (T, V)
        count += len(logps)
        outputs = [rounding.output for rounding in roundings]
        for _ in range(DRAWS):
            samples = torch.multinomial(logps.detach().exp(), 1, generator=generator)
            sampled = logps.gather(-1, samples).sum()
            gradients = torch.autograd.grad(sampled, outputs, retain_graph=True)
            for rounding, gradient in zip(roundings, gradients, strict=True):
                change = (gradient.float() * rounding.error.float()).sum(-1)  # (1, T)
                sums[rounding.rounded] += float(change.square().sum()) / (2 * DRAWS)
    for hook in hooks:
        hook.remove()
    return defaultdict(float, {rounded: kl / count for rounded, kl in sums.items()})
