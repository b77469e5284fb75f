"""The command from start to end: check, let one engine per format answer, score the answers, count."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trl_qurl.lab.formats import candidates
from trl_qurl.lab.mismatch.engines import BASELINE, Engines, Sampling
from trl_qurl.lab.mismatch.statistics import Mismatch, measure

if TYPE_CHECKING:
    from trl_qurl.lab.mismatch.keep import Budget, Kept
    from trl_qurl.lab.mismatch.score import Scored


@dataclass(frozen=True)
class Report:
    """What was measured.

    Attributes:
        model: As it was named.
        sampling: How much was sampled.
        ignore: Modules kept in full precision.
        formats: By format, `"none"` for a 16-bit engine.
        failures: By format, why there are no figures.
        kept: The layers that were chosen to stay in 16 bits.
        seconds: How long it all took.
    """

    model: str
    sampling: Sampling
    ignore: tuple[str, ...]
    formats: dict[str, Mismatch] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    kept: Kept | None = None
    seconds: float = 0.0

    @property
    def by_kernels(self) -> float | None:
        """The KL of a 16-bit engine: what kernels alone cause."""
        return self.formats[BASELINE].kl_k3.value if BASELINE in self.formats else None


def measure_mismatch(
    model: str,
    sampling: Sampling | None = None,
    schemes: Sequence[str] | None = None,
    ignore: Sequence[str] = ("lm_head",),
    engine_kwargs: Mapping[str, Any] = MappingProxyType({}),
    say: Callable[[str], None] = lambda line: None,
    output: Path | None = None,
    budget: Budget | None = None,
    smooths: bool = True,
) -> tuple[Report, dict[str, list[float]]]:
    """Measure how far engines in several formats are from the full-precision policy.

    Args:
        model: Name on the Hub, or directory of a model in full precision.
        sampling: How much is sampled.
        schemes: Names of formats, without `"none"`; by default those that fit this machine and the model.
        ignore: Modules kept in full precision.
        engine_kwargs: Further arguments of `vllm.LLM`.
        say: Called with a line about what is being done.
        output: JSON file, written again after each format.
        budget: Find layers to keep in 16 bits for it; there must be one format then.
        smooths: Whether activations are smoothed where a run smooths them by default (`smooth_activations`).

    Returns:
        The figures, and log ρ of every token by format.

    Raises:
        ValueError: If arguments do not fit, or the model cannot be quantized.
        FileNotFoundError: If a model or a file does not exist.
        ImportError: If vLLM is missing.
        ChildProcessError: If no engine could answer; what the process printed says why.
    """
    started = time.monotonic()
    from trl_qurl.lab.mismatch.keep import keep_layers

    sampling = sampling or Sampling()
    chosen = candidates(schemes)
    if budget is not None and len(chosen) != 1:
        given = ", ".join(scheme.name for scheme in chosen)
        raise ValueError(f"Layers are chosen for one format, not for {given}: name it with --schemes.")
    engines = Engines(model, sampling, engine_kwargs, say, smooths)
    chosen = engines.formats(schemes, ignore)
    for scheme in chosen:
        engines.check(scheme, ignore)
    names = [BASELINE, *(scheme.name for scheme in chosen)]
    report = Report(model, sampling, tuple(ignore))
    log_ratios: dict[str, list[float]] = {}
    for name in names:
        try:
            scored = engines.sample(name, ignore)
        except ChildProcessError as error:
            is_needed = budget is not None and name == chosen[0].name
            if is_needed or (name == names[-1] and not report.formats):
                raise
            report = replace(report, failures={**report.failures, name: str(error)})
            continue
        report = replace(report, formats={**report.formats, name: measure(scored)})
        log_ratios[name] = log_ratios_of(scored)
        report = replace(report, seconds=time.monotonic() - started)
        write_report(report, output)
    if budget is not None:
        kept, scored = keep_layers(engines, chosen[0], report, budget, say)
        log_ratios[kept.name] = log_ratios_of(scored)
        formats = {**report.formats, kept.name: measure(scored)}
        report = replace(report, formats=formats, kept=kept, seconds=time.monotonic() - started)
        write_report(report, output)
    return report, log_ratios


def log_ratios_of(scored: Sequence[Scored]) -> list[float]:
    """log ρ of every token."""
    return [value for row in scored for value in (row.proximal_logps - row.behavior_logps).tolist()]


def write_report(report: Report, path: Path | None) -> None:
    """Write all figures as JSON; the file is complete whenever it is there."""
    if path is None:
        return
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    os.replace(draft, path)
