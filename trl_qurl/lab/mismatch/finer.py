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
from typing import TYPE_CHECKING, Any

import torch

from trl_qurl.lab.comparison import BASELINE
from trl_qurl.lab.mismatch.report import Choice, Report, Step
from trl_qurl.lab.mismatch.statistics import Mismatch
from trl_qurl.quantization.fake_quantization import QuantizedLinear
from trl_qurl.quantization.formats import SCHEMES
from trl_qurl.quantization.layers import fused_groups, linear_layers
from trl_qurl.quantization.plan import REST
from trl_qurl.quantization.scheme import QuantizationScheme
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.rollout.engine.hardware import available_formats

if TYPE_CHECKING:
    from trl_qurl.lab.mismatch.engines import Engines

ROUNDS = 3
"""Maximum number of choices to try with an engine."""

FINER = "w8a16"
"""Format to try before 16 bits, where it runs: exact activations for a few bytes of scales."""

DRAWS = 4  # tokens to sample at each position
MOST_TOKENS = 512


def choose_finer(
    engines: Engines, scheme: str, report: Report, limit: float
) -> tuple[Choice, Mismatch]:
    """Choose layers for finer formats than `scheme`, and measure an engine with that choice.

    `report` has measurements of a 16-bit engine and of one with all layers in `scheme`, and `limit`
    is in nats per token. Raises `ValueError` if even a 16-bit engine exceeds it, or all layers
    would have to be in 16 bits.
    """
    reached, kernels = report.formats[scheme].kl_k3.value, report.by_kernels
    if kernels >= limit:
        raise ValueError(
            f"--kl {limit:g} is out of reach: even a 16-bit engine has a KL of {kernels:.2g}, "
            "whichever layers are kept. Raise --kl."
        )
    engines.say("Estimating the KL that each layer causes")
    finer = [SCHEMES[FINER]] if FINER in available_formats() and scheme != FINER else []
    with engines.weights(scheme) as weights:
        steps = find_steps(engines.policy, weights, engines.prompts, finer)
    taken: list[Step] = []
    allowed = limit
    for _ in range(ROUNDS):
        # Calibrate: the estimates of the steps not taken sum to the KL that the engine shows beyond
        # its kernels.
        remaining = sum(step.kl for step in steps[len(taken) :])
        taken = within_kl(steps, remaining * (allowed - kernels) / max(reached - kernels, 1e-12))
        if len(taken) == len(steps):
            raise ValueError(
                f"A KL below {allowed:.2g} would require all layers in 16 bits: raise --kl or "
                "choose a finer format."
            )
        formats = {layer: step.format for step in taken for layer in step.layers} | {REST: scheme}
        mismatch = engines.measure(formats)
        reached = mismatch.kl_k3.value
        if reached <= limit:
            break
        # leave a margin: the next measurement is noisy, too
        allowed = kernels + 0.9 * (limit - kernels)
    return Choice(
        f"{scheme}, {len(formats) - 1} finer", formats, len(taken), tuple(steps), limit
    ), mismatch


def within_kl(steps: Sequence[Step], budget: float) -> list[Step]:
    """Choose the shortest prefix of the steps, such that the others' KL estimates sum to at most
    `budget`.
    """
    taken, remaining = 0, sum(step.kl for step in steps)
    while taken < len(steps) and remaining > budget:
        remaining -= steps[taken].kl
        taken += 1
    return list(steps[:taken])


def find_steps(
    model: Any,
    weights: WeightStream,
    sequences: Iterable[Sequence[int]],
    finer: Sequence[QuantizationScheme] = (),
) -> list[Step]:
    """Return steps that lower the KL, most KL per byte first: 16 bits for a group of layers, and
    `finer` before.

    The stream's `model` must be whole, in memory and in evaluation mode. Experts are left out. Of
    the tokens in `sequences` (prompts or answers), the first `MOST_TOKENS` are used.
    """
    schemes, stored = (
        weights.plan.schemes,
        (item for each in weights.form.layout.values() for item in each.items()),
    )
    halves = {name.removesuffix(".weight"): tensor.to(torch.bfloat16) for name, tensor in stored}
    formats: dict[tuple[str, ...], list[QuantizationScheme]] = {}
    for group in fused_groups(schemes):
        fitting = [
            each for each in finer if not any(each.refusal(halves[layer].shape) for layer in group)
        ]
        formats[group] = [schemes[group[0]], *fitting]
    kls = estimate_kl(
        model, weights, sequences, {layer: formats[group] for group in formats for layer in group}
    )
    steps = []
    for group, (coarse, *others) in formats.items():
        sizes = {
            form: sum(stored_bytes(halves[x], form) for x in group)
            for form in (coarse, *others, None)
        }
        kl = {form: sum(kls[x, form] for x in group) for form in (coarse, *others)}
        whole = Step(group, BASELINE, kl[coarse], sizes[None] - sizes[coarse])
        for form in others:
            first = Step(group, form.name, kl[coarse] - kl[form], sizes[form] - sizes[coarse])
            if worth(first) > worth(whole):
                steps.append(first)
                whole = Step(group, BASELINE, kl[form], sizes[None] - sizes[form])
        steps.append(whole)
    return sorted(steps, key=worth, reverse=True)


def worth(step: Step) -> float:
    """Return the KL that a step removes per byte."""
    return step.kl / max(step.extra_bytes, 1)


def stored_bytes(weight: torch.Tensor, scheme: QuantizationScheme | None) -> int:
    """Return the size of a layer in a checkpoint, with `None` unchanged."""
    return (
        weight.nbytes
        if scheme is None
        else sum(part.nbytes for part in scheme.layout(weight).values())
    )


def estimate_kl(
    model: Any,
    weights: WeightStream,
    sequences: Iterable[Sequence[int]],
    formats: Mapping[str, Sequence[QuantizationScheme]],
) -> Mapping[tuple[str, QuantizationScheme], float]:
    """Estimate the KL, in nats per token, of each layer in each of its formats, rounded alone; see
    `find_steps`.
    """
    smoothing = weights.smoothing
    estimates: defaultdict[tuple[str, QuantizationScheme], float] = defaultdict(float)
    generator, count = torch.Generator(model.device).manual_seed(0), 0
    # of a pass, with the outputs
    errors: list[tuple[tuple[str, QuantizationScheme], torch.Tensor, torch.Tensor]] = []

    def compare(
        name: str, layer: Any, inputs: tuple[torch.Tensor, ...], exact: torch.Tensor
    ) -> None:
        for scheme in formats[name]:
            scale = smoothing.input_scale(name) if smoothing and scheme.is_smoothed else None
            error = QuantizedLinear(layer, scheme, scale)(inputs[0]) - exact.detach()
            errors.append(((name, scheme), exact.requires_grad_(), error))

    hooks = [
        layer.register_forward_hook(partial(compare, name))
        for name, layer in linear_layers(model, formats)
    ]
    for tokens in sequences:
        tokens = tokens[: MOST_TOKENS - count]
        if not tokens:
            continue
        errors.clear()
        logits = (
            model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False)
            .logits[0]
            .float()
        )
        logps = logits.log_softmax(-1)  # (T, V)
        count += len(logps)
        outputs = [output for _, output, _ in errors]
        for _ in range(DRAWS):
            samples = torch.multinomial(logps.detach().exp(), 1, generator=generator)
            gradients = torch.autograd.grad(
                logps.gather(-1, samples).sum(), outputs, retain_graph=True
            )
            for (rounded, _, error), gradient in zip(errors, gradients, strict=True):
                change = (gradient.float() * error.float()).sum(-1)  # (1, T)
                estimates[rounded] += float(change.square().sum()) / (2 * DRAWS)
    for hook in hooks:
        hook.remove()
    return defaultdict(float, {rounded: kl / count for rounded, kl in estimates.items()})
