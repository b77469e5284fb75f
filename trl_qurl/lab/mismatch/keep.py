"""Layers to keep in 16 bits, so that a format's KL, or the bytes that this costs, stay within a budget.

The layers are chosen by an estimate of what each causes (`quantization/sensitivity.py`), and then a real engine says
what came of it. What no list can change are the engine's kernels: the KL of a 16-bit engine is taken off the budget
first, and the rest is measured in units of what the estimates explain of the engine's KL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trl_qurl.lab.mismatch.statistics import measure

if TYPE_CHECKING:
    from trl_qurl.lab.mismatch.engines import Engines
    from trl_qurl.lab.mismatch.run import Report
    from trl_qurl.lab.mismatch.score import Scored
    from trl_qurl.quantization.scheme import QuantizationScheme

ROUNDS = 3
"""Lists that are tried with an engine, until one is within the budget."""


@dataclass(frozen=True)
class Budget:
    """What is allowed; one of the two.

    Attributes:
        kl: Largest KL of the engine, in nats per token.
        bytes: Most bytes that the engine's weights may grow by.
    """

    kl: float | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        if (self.kl is None) == (self.bytes is None):
            raise ValueError("Give one budget: --kl, or --megabytes.")
        if not (self.kl or self.bytes or 0) > 0:
            raise ValueError(f"A budget of {self.kl if self.bytes is None else self.bytes} leaves nothing: raise it.")


@dataclass(frozen=True)
class Group:
    """Layers that an engine fuses, which are quantized together or not at all.

    Attributes:
        layers: Their names.
        extra_bytes: What they take more in 16 bits than quantized.
        kl: Estimate of the KL that their rounding causes, in nats per token.
    """

    layers: tuple[str, ...]
    extra_bytes: int
    kl: float


@dataclass(frozen=True)
class Kept:
    """The layers that were chosen.

    Attributes:
        scheme: Name of the format of the other layers.
        name: Of the format with these layers in 16 bits, among those of the report.
        ignore: For `quantization_ignore`.
        extra_bytes: What the engine's weights grow by.
        share: The same of what quantization saves.
        groups: All groups of layers, those first that are worth most per byte; the first ones are kept.
        budget: What was allowed.
    """

    scheme: str
    name: str
    ignore: tuple[str, ...]
    extra_bytes: int
    share: float
    groups: tuple[Group, ...]
    budget: Budget


def keep_layers(
    engines: Engines,
    scheme: QuantizationScheme,
    report: Report,
    budget: Budget,
    say: Callable[[str], None],
) -> tuple[Kept, list[Scored]]:
    """Choose layers, and let an engine answer that has them in 16 bits.

    Args:
        engines: Of the model.
        scheme: Of the layers that are not kept.
        report: What was measured with none kept; it has a 16-bit engine, too.
        budget: What is allowed.
        say: Called with a line about what is being done.

    Returns:
        The choice, and the answers of its engine under both policies.

    Raises:
        ValueError: If a 16-bit engine alone is over the budget.
        ChildProcessError: If the engine failed.
    """
    found, kernels = report.formats[scheme.name].kl_k3.value, report.by_kernels or 0.0
    if budget.kl is not None and kernels >= budget.kl:
        raise ValueError(
            f"A 16-bit engine has a KL of {kernels:.2g} already, so no list of layers can reach --kl {budget.kl:g}: "
            "raise it."
        )
    say("Estimating what each layer causes")
    groups = estimate_groups(engines, scheme, report.ignore)
    allowed, reached, kept = budget.kl, found, []
    for _ in range(ROUNDS):
        if allowed is None:
            kept = within_bytes(groups, budget.bytes or 0)
        else:
            # The estimates of what is not kept stand for what rounding costs the engine so far.
            left = sum(group.kl for group in groups if group not in kept)
            kept = within_kl(groups, left * (allowed - kernels) / max(reached - kernels, 1e-12))
        if len(kept) == len(groups):
            raise ValueError(
                f"Only with all layers in 16 bits the KL is below {allowed:.2g}: raise --kl, or choose a finer format."
            )
        ignore = (*report.ignore, *(layer for group in kept for layer in group.layers))
        scored = engines.sample(scheme.name, ignore)
        reached = measure(scored).kl_k3.value
        if allowed is None or budget.kl is None or reached <= budget.kl:
            break
        allowed = kernels + 0.9 * (budget.kl - kernels)  # the next measurement scatters, too
    extra = sum(group.extra_bytes for group in kept)
    share = extra / sum(group.extra_bytes for group in groups)
    rest = [group for group in groups if group not in kept]
    name = f"{scheme.name}, {len(kept)} kept"
    return Kept(scheme.name, name, ignore, extra, share, (*kept, *rest), budget), scored


def estimate_groups(engines: Engines, scheme: QuantizationScheme, ignore: Sequence[str]) -> list[Group]:
    """All groups of layers, those with most KL per byte first."""
    from trl_qurl.quantization.sensitivity import by_worth, estimate_kl, extra_bytes

    with engines.policy() as policy, engines.weights(scheme, ignore) as weights:
        estimates, sizes = estimate_kl(policy, weights, engines.prompts), extra_bytes(policy, scheme, weights.layers)
    return [Group(group, sum(sizes[x] for x in group), estimates[group]) for group in by_worth(estimates, sizes)]


def within_bytes(groups: Sequence[Group], budget: int) -> list[Group]:
    """The groups to keep in 16 bits for at most so many bytes: in their order, while they fit."""
    kept: list[Group] = []
    for group in groups:
        if group.extra_bytes <= budget - sum(other.extra_bytes for other in kept):
            kept.append(group)
    return kept


def within_kl(groups: Sequence[Group], budget: float) -> list[Group]:
    """The fewest of the groups, in their order, without which the others' estimates add up to the budget at most."""
    left = sum(group.kl for group in groups)
    kept: list[Group] = []
    for group in groups:
        if left <= budget:
            break
        kept.append(group)
        left -= group.kl
    return kept


def write_settings(kept: Kept, path: Path) -> None:
    """Write a file for `--config`."""
    import yaml

    settings = {"rollout_quantization": kept.scheme, "quantization_ignore": list(kept.ignore)}
    path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
