"""Choose layers to keep in 16 bits, so that the engine stays below a KL.

Layers are chosen by estimates of the KL that each causes (`quantization/sensitivity.py`), and a real engine measures
the result. Keeping layers cannot remove the KL of the kernels, so the KL of a 16-bit engine is subtracted
from the limit first. The rest is rescaled by how well the estimates explain the engine's KL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trl_qurl.lab.mismatch.statistics import Mismatch, measure

if TYPE_CHECKING:
    from trl_qurl.lab.mismatch.engines import Engines
    from trl_qurl.lab.mismatch.run import Report
    from trl_qurl.quantization.scheme import QuantizationScheme

ROUNDS = 3
"""Maximum number of choices to try with an engine."""


@dataclass(frozen=True)
class Group:
    """Layers that the engine fuses, so they must share a format."""

    layers: tuple[str, ...]
    extra_bytes: int  # in 16 bits, compared to quantized
    kl: float  # estimate, from rounding them, in nats per token


@dataclass(frozen=True)
class Kept:
    """The layers chosen to stay in 16 bits."""

    scheme: str  # format of the other layers
    name: str  # key of the mixed format in the report
    ignore: tuple[str, ...]  # value for `quantization_ignore`
    extra_bytes: int  # growth of the engine's weights
    share: float  # `extra_bytes` as a share of what quantization saves
    groups: tuple[Group, ...]  # all groups of layers, the kept ones first, then by KL per byte
    limit: float  # the KL they were chosen for, in nats per token


def keep_layers(engines: Engines, scheme: QuantizationScheme, report: Report, limit: float) -> tuple[Kept, Mismatch]:
    """Choose layers to keep in 16 bits, and measure an engine with that choice.

    Args:
        engines: Engines of the model.
        scheme: Format of the layers that are not kept.
        report: Measurements of a 16-bit engine and of one without kept layers.
        limit: Maximum KL of the engine, in nats per token.

    Returns:
        The choice, and the statistics of its engine.

    Raises:
        ValueError: If even a 16-bit engine exceeds the limit, or all layers would have to stay in 16 bits.
        ChildProcessError: If the engine failed.
    """
    measured, kernels = report.formats[scheme.name].kl_k3.value, report.by_kernels or 0.0
    if kernels >= limit:
        raise ValueError(
            f"--kl {limit:g} is out of reach: even a 16-bit engine has a KL of {kernels:.2g}, whichever layers "
            "are kept. Raise --kl."
        )
    engines.say("Estimating the KL that each layer causes")
    groups = estimate_groups(engines, scheme, report.ignore)
    kept: list[Group] = []
    allowed, reached = limit, measured
    for _ in range(ROUNDS):
        # Calibrate: the quantized layers' estimates sum to the KL that the engine shows beyond its kernels.
        remaining = sum(group.kl for group in groups if group not in kept)
        kept = within_kl(groups, remaining * (allowed - kernels) / max(reached - kernels, 1e-12))
        if len(kept) == len(groups):
            raise ValueError(
                f"A KL below {allowed:.2g} would require all layers in 16 bits: raise --kl or choose a finer format."
            )
        ignore = (*report.ignore, *(layer for group in kept for layer in group.layers))
        found = measure(engines.sample(scheme.name, ignore))
        reached = found.kl_k3.value
        if reached <= limit:
            break
        allowed = kernels + 0.9 * (limit - kernels)  # leave a margin: the next measurement is noisy, too
    extra = sum(group.extra_bytes for group in kept)
    share = extra / sum(group.extra_bytes for group in groups)
    rest = [group for group in groups if group not in kept]
    name = f"{scheme.name}, {len(kept)} kept"
    return Kept(scheme.name, name, ignore, extra, share, (*kept, *rest), limit), found


def estimate_groups(engines: Engines, scheme: QuantizationScheme, ignore: Sequence[str]) -> list[Group]:
    """Return all groups of layers in descending order of KL per byte."""
    from trl_qurl.quantization.sensitivity import by_worth, estimate_kl, extra_bytes

    with engines.policy() as policy, engines.weights(scheme.name, ignore) as weights:
        estimates, sizes = estimate_kl(policy, weights, engines.prompts), extra_bytes(weights)
    return [Group(group, sum(sizes[x] for x in group), estimates[group]) for group in by_worth(estimates, sizes)]


def within_kl(groups: Sequence[Group], budget: float) -> list[Group]:
    """Choose the shortest prefix of the groups to keep, such that the others' KL estimates sum to at most `budget`."""
    remaining = sum(group.kl for group in groups)
    kept: list[Group] = []
    for group in groups:
        if remaining <= budget:
            break
        kept.append(group)
        remaining -= group.kl
    return kept


def write_settings(kept: Kept, path: Path) -> None:
    """Write the choice as a settings file for `--config`."""
    import yaml

    settings = {"rollout_quantization": kept.scheme, "quantization_ignore": list(kept.ignore)}
    path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
