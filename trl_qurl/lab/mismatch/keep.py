"""Layers to keep in 16 bits, so that a format's KL, or the bytes that this costs, stay within a budget.

The layers are chosen by the trainer's own quantized forward pass, and then a real engine says what came of it. What
the pass leaves out are the engine's kernels: the KL of a 16-bit engine is taken off the budget first, and the rest is
measured in units of what the pass explains of the engine's KL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trl_qurl.lab.mismatch.job import Answer
from trl_qurl.lab.mismatch.sensitivity import Group, Sensitivity, within_bytes, within_kl
from trl_qurl.lab.mismatch.statistics import measure

if TYPE_CHECKING:
    import torch

    from trl_qurl.lab.mismatch.engines import Engines
    from trl_qurl.lab.mismatch.run import Report
    from trl_qurl.lab.mismatch.score import Scored
    from trl_qurl.quantization.schemes import QuantizationScheme

ROUNDS = 3
"""Lists that are tried with an engine, each with half the KL of the last, until one is within the budget."""


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
class Kept:
    """The layers that were chosen.

    Attributes:
        scheme: Name of the format of the other layers.
        name: Of the format with these layers in 16 bits, among those of the report.
        ignore: For `quantization_ignore`.
        extra_bytes: What the engine's weights grow by.
        groups: All groups of layers, those first that are worth most per byte; the first ones are kept.
        budget: What was allowed.
    """

    scheme: str
    name: str
    ignore: tuple[str, ...]
    extra_bytes: int
    groups: tuple[Group, ...]
    budget: Budget


def keep_layers(
    engines: Engines,
    scheme: QuantizationScheme,
    report: Report,
    answers: Sequence[Answer],
    budget: Budget,
    say: Callable[[str], None],
) -> tuple[Kept, list[Scored]]:
    """Choose layers, and let an engine answer that has them in 16 bits.

    Args:
        engines: Of the model.
        scheme: Of the layers that are not kept.
        report: What was measured with none kept; it has a 16-bit engine, too.
        answers: Of the quantized engine.
        budget: What is allowed.
        say: Called with a line about what is being done.

    Returns:
        The choice, and the answers of its engine under both policies.

    Raises:
        ValueError: If a 16-bit engine alone is over the budget.
        ChildProcessError: If the engine failed.
    """
    layers = engines.check(scheme, report.ignore)
    found, kernels = report.formats[scheme.name].kl_k3.value, report.by_kernels or 0.0
    if budget.kl is not None and kernels >= budget.kl:
        raise ValueError(
            f"A 16-bit engine has a KL of {kernels:.2g} already, so no list of layers can reach --kl {budget.kl:g}: "
            "raise it."
        )
    with engines.policy() as policy:
        sensitivity = Sensitivity(policy, scheme, layers, answers)
        sizes = extra_bytes(policy, scheme, layers)
        groups = sensitivity.measure(sizes, say)
        explained = groups[0].kl_all / max(found - kernels, 1e-12)
    allowed = budget.kl
    for _ in range(ROUNDS):
        if allowed is None:
            kept = within_bytes(groups, budget.bytes or 0)
        else:
            with engines.policy():
                kept = within_kl(groups, (allowed - kernels) * min(explained, 1.0), sensitivity)
        chosen = tuple(layer for group in kept for layer in group.layers)
        if len(chosen) == len(layers):
            raise ValueError(
                f"Only with all layers in 16 bits the KL is below {allowed:.2g}: raise --kl, or choose a finer format."
            )
        ignore = (*report.ignore, *chosen)
        scored = engines.sample(scheme.name, ignore)[1]
        if allowed is None or budget.kl is None or measure(scored).kl_k3.value <= budget.kl:
            break
        allowed = kernels + (allowed - kernels) / 2
    extra = sum(group.extra_bytes for group in kept)
    rest = [group for group in groups if group not in kept]
    name = f"{scheme.name}, {len(kept)} kept"
    return Kept(scheme.name, name, ignore, extra, (*kept, *rest), budget), scored


def extra_bytes(model: torch.nn.Module, scheme: QuantizationScheme, layers: frozenset[str]) -> dict[str, int]:
    """What each layer takes more in 16 bits than quantized, in bytes."""
    import torch

    from trl_qurl.quantization.checkpoint_form import CheckpointForm

    shapes = {
        name.removesuffix(".weight"): tensor.shape
        for held in CheckpointForm(model, splits_experts=True).held.values()
        for name, tensor in held.items()
    }
    sizes = {}
    for layer in layers:
        quantized = sum(stored.nbytes for stored in scheme.layout(shapes[layer], torch.bfloat16))
        sizes[layer] = 2 * shapes[layer].numel() - quantized
    return sizes


def write_settings(kept: Kept, path: Path) -> None:
    """Write a file for `--config`."""
    import yaml

    settings = {"rollout_quantization": kept.scheme, "quantization_ignore": list(kept.ignore)}
    path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
