"""A bench for people: the table, and what it means in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trl_qurl.lab.bench.costs import Range
from trl_qurl.lab.bench.prediction import WORTHWHILE, Comparison, predict_step
from trl_qurl.lab.bench.run import Bench
from trl_qurl.lab.formats import label

if TYPE_CHECKING:
    from rich.table import Table


def build_table(result: Bench) -> Table:
    """Seconds of a step by format, within 80 columns."""
    from rich import box
    from rich.table import Table

    workload = result.workload
    table = Table(
        title=f"{result.model}: one step of {workload.batch} completions, {workload.completion_len} tokens each",
        box=box.SIMPLE_HEAD,
        padding=0,
        caption="Seconds; estimated from shorter runs where a whole step would take too long.",
        caption_justify="left",
    )
    table.add_column("format", no_wrap=True)
    for heading in ("tok/s", "sync", "rollout", "score", "update", "step", "speed-up", "weights"):
        table.add_column(heading, justify="right", no_wrap=True)
    for scheme, measurement in result.measurements.items():
        comparison = result.comparisons.get(scheme)
        step = predict_step(measurement, result.training, workload)
        parts = [step.generate, step.score, step.update, step.total] if result.training else [step.generate]
        table.add_row(
            label(scheme),
            f"{measurement.tokens_per_second(workload.completion_len, workload.batch):.0f}",
            shown(step.sync.middle),
            *(shown(part.middle) for part in parts),
            *["-"] * (4 - len(parts)),
            speedup(comparison.speedup) if comparison else "",
            size(measurement.weight_bytes),
        )
    return table


def sentences(result: Bench) -> list[str]:
    """What to do, and why, for each format."""
    lines = []
    if result.baseline and result.training:
        share = result.baseline.rollout_share
        lines.append(
            f"Rollouts and their sync take {share:.0%} of a 16-bit step. If they were free, a step would be "
            f"{1 / (1 - share):.1f} times as fast; no format can do better."
        )
    for scheme, comparison in result.comparisons.items():
        lines.append(f"{label(scheme)}: {advice(comparison)} {break_even(comparison, result)}")
    lines += [f"{label(part)}: not measured. {failure}" for part, failure in result.failures.items()]
    lines += [result.too_large] if result.too_large else []
    return lines


def advice(comparison: Comparison) -> str:
    """One sentence that may be "don't"."""
    gain = speedup(comparison.speedup)
    rollout = f"rollouts {comparison.rollout_speedup:.2f} times as fast"
    if comparison.training_limit is not None:
        if comparison.advice == "no":
            return f"Don't, for speed: rollout and sync are {gain} times as fast ({rollout})."
        return (
            f"Yes, if scoring and updates of a rollout take less than {shown(comparison.training_limit)} s: rollout "
            f"and sync are {gain} times as fast ({rollout})."
        )
    if comparison.advice == "yes":
        return f"Yes. Expect steps {gain} times as fast ({rollout})."
    if comparison.advice == "no":
        return f"Don't, for speed: steps would be {gain} times as fast ({rollout})."
    return (
        f"Unclear: steps would be {gain} times as fast ({rollout}), and {WORTHWHILE:.2f} is what makes it worth it. "
        "Without --quick the range is narrower."
    )


def break_even(comparison: Comparison, result: Bench) -> str:
    """From which length on a format saves time, and how much memory it saves."""
    saved = f"The engine's weights are {size(comparison.bytes_saved)} smaller."
    if comparison.break_even is None:
        return f"It saves no time at any length up to {16 * result.workload.completion_len} tokens. {saved}"
    if comparison.break_even == 1:
        return f"It saves time at any completion length. {saved}"
    return f"It saves time for completions of at least {comparison.break_even} tokens. {saved}"


def speedup(value: Range) -> str:
    """A ratio with its range."""
    return f"{value.middle:.2f} ({value.low:.2f}-{value.high:.2f})"


def size(count: int) -> str:
    """Bytes in readable units."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def shown(seconds: float) -> str:
    """Seconds with three digits."""
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.3g}" if seconds >= 0.1 else f"{seconds:.3f}"
