"""The whole command: validate, sample from one engine per format, score the answers, compute statistics."""

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
    """Results of a mismatch measurement.

    Attributes:
        model: Name or directory from the command line.
        sampling: Questions and number of answers.
        ignore: Modules kept in full precision.
        formats: Statistics by format, `"none"` for a 16-bit engine.
        failures: Reason for missing statistics, by format.
        kept: Layers chosen to stay in 16 bits.
        seconds: Total run time.
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
        """The KL of a 16-bit engine, which kernels alone cause."""
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
        model: Hub name or directory of a full-precision model.
        sampling: Questions to ask and answers to sample.
        schemes: Format names, without `"none"`; by default all that this machine and the model support.
        ignore: Modules to keep in full precision.
        engine_kwargs: Extra arguments for `vllm.LLM`.
        say: Called with each progress message.
        output: JSON file, rewritten after each format.
        budget: Also choose layers to keep in 16 bits within this budget; requires exactly one format.
        smooths: Smooth activations for the formats that training smooths by default (`smooth_activations`).

    Returns:
        The report, and log ρ of every token by format.

    Raises:
        ValueError: If an argument is invalid, or the model cannot be quantized.
        FileNotFoundError: If the model or a file does not exist.
        ImportError: If vLLM is missing.
        ChildProcessError: If no engine could answer; the process output says why.
    """
    started = time.monotonic()
    from trl_qurl.lab.mismatch.keep import keep_layers

    sampling = sampling or Sampling()
    chosen = candidates(schemes)
    if budget is not None and len(chosen) != 1:
        formats = ", ".join(scheme.name for scheme in chosen)
        raise ValueError(f"A budget requires exactly one format, but got {formats}: choose one with --schemes.")
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
        statistics = {**report.formats, kept.name: measure(scored)}
        report = replace(report, formats=statistics, kept=kept, seconds=time.monotonic() - started)
        write_report(report, output)
    return report, log_ratios


def log_ratios_of(scored: Sequence[Scored]) -> list[float]:
    """Return log ρ of every token."""
    return [value for row in scored for value in (row.proximal_logps - row.behavior_logps).tolist()]


def write_report(report: Report, path: Path | None) -> None:
    """Write the report as JSON, atomically."""
    if path is None:
        return
    tmp = path.with_suffix(".tmp")
    tmp.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    os.replace(tmp, path)
