"""A readable benchmark report: the table, and one sentence of advice per format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trl_qurl.lab.bench.prediction import WORTHWHILE, Comparison, Range, predict_step
from trl_qurl.lab.bench.run import Bench
from trl_qurl.lab.comparison import label, new_table

if TYPE_CHECKING:
    from rich.table import Table


def build_table(result: Bench) -> Table:
    """Build a table of the seconds per step by format, within 80 columns."""
    workload = result.workload
    title = f"{result.model}: one step of {workload.batch} completions, {workload.completion_len} tokens each"
    caption = "Seconds; extrapolated from shorter runs if a whole step would take too long."
    figures = ("tok/s", "sync", "rollout", "score", "update", "step", "speed-up", "weights")
    table = new_table(title, caption, "format", *figures)
    for scheme, measurement in result.measurements.items():
        comparison = result.comparisons.get(scheme)
        step = predict_step(measurement, result.training, workload)
        parts = [step.generate, step.score, step.update, step.total] if result.training else [step.generate]
        table.add_row(
            label(scheme),
            f"{workload.batch * workload.completion_len / step.generate.middle:.0f}",
            digits(step.sync.middle),
            *(digits(part.middle) for part in parts),
            *["-"] * (4 - len(parts)),
            speedup(comparison.speedup) if comparison else "",
            size(measurement.weight_bytes),
        )
    return table


def sentences(result: Bench) -> list[str]:
    """Return the advice for each format, with its reason."""
    lines = []
    if result.baseline and result.training:
        share = result.baseline.rollout_share
        lines.append(
            f"Rollouts and their syncs take {share:.0%} of a 16-bit step. If they were free, a step would be "
            f"{1 / (1 - share):.1f} times as fast; no format can do better."
        )
    lines += [f"{label(scheme)}: {advice(comparison)}" for scheme, comparison in result.comparisons.items()]
    lines += [f"{label(part)}: not measured. {failure}" for part, failure in result.failures.items()]
    lines += [result.too_large] if result.too_large else []
    return lines


def advice(comparison: Comparison) -> str:
    """Summarize in one sentence whether the format is worth it."""
    gain = speedup(comparison.speedup)
    rollout = f"rollouts {comparison.rollout_speedup:.2f} times as fast"
    if comparison.training_limit is not None:
        if comparison.advice == "no":
            return f"Not worth it for speed: rollout and sync are {gain} times as fast ({rollout})."
        return (
            f"Worth it if scoring and updates take less than {digits(comparison.training_limit)} s per rollout: "
            f"rollout and sync are {gain} times as fast ({rollout})."
        )
    if comparison.advice == "yes":
        return f"Worth it: expect steps {gain} times as fast ({rollout})."
    if comparison.advice == "no":
        return f"Not worth it for speed: steps would be {gain} times as fast ({rollout})."
    return f"Unclear: steps would be {gain} times as fast ({rollout}), and it takes {WORTHWHILE:.2f} to be worth it."


def speedup(value: Range) -> str:
    """Format a ratio with its range."""
    return f"{value.middle:.2f} ({value.low:.2f}-{value.high:.2f})"


def size(count: int) -> str:
    """Format bytes in readable units."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def digits(seconds: float) -> str:
    """Format seconds with three digits."""
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.3g}" if seconds >= 0.1 else f"{seconds:.3f}"
