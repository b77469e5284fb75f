"""Measured costs, the step that they predict, and the verdict: a table, and one sentence per
format.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from trl_qurl.lab.bench.workload import Workload
from trl_qurl.lab.comparison import BASELINE, label, new_table

if TYPE_CHECKING:
    from rich.table import Table

WORTHWHILE = 1.05
"""Minimum speed-up of a step that justifies quantized rollouts as another source of error."""


class Range(NamedTuple):
    """An estimate with the lower and upper bounds that the measurements allow."""

    low: float
    middle: float
    high: float

    def __add__(self, other: Range) -> Range:  # type: ignore[override]
        return Range(self.low + other.low, self.middle + other.middle, self.high + other.high)

    def times(self, factor: float) -> Range:
        """Multiply all bounds by a positive factor."""
        return Range(self.low * factor, self.middle * factor, self.high * factor)


NOTHING = Range(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Timing:
    """Durations of an operation at one size."""

    size: int  # in tokens
    seconds: list[float]  # of each repetition

    @property
    def range(self) -> Range:
        """The fastest, median and slowest repetition."""
        return Range(min(self.seconds), statistics.median(self.seconds), max(self.seconds))


@dataclass(frozen=True)
class EngineCosts:
    """Costs of rollouts in one format."""

    # a whole batch at three completion lengths, ascending; one token costs what prompts do
    generation: list[Timing]
    sync: Timing  # quantizing all weights and loading them into the engine
    weight_bytes: int  # of the engine

    def generate(self, tokens: int) -> Range:
        r"""Estimate the seconds to generate a batch of completions.

        $$T(L) = T(1) + (L - 1)\,(r + g\,L/2)$$

        Where the rate $r$ and its growth with the context $g \ge 0$ come from the measured lengths.
        Between these lengths the estimate interpolates; beyond them, the low bound keeps the rate
        of the longest one.
        """
        first, short, longest = self.generation
        rate = per_token(first, longest)
        if tokens > longest.size:
            early, late = per_token(first, short), per_token(short, longest)
            # between the midpoints of the two intervals over which the rates are averages
            span = longest.size / 2
            growth = max(0.0, (late.middle - early.middle) / span)
            added = growth * (tokens - longest.size) / 2
            rate = Range(rate.low, rate.middle + added, rate.high + 2 * added)
        return first.range + rate.times(tokens - 1)


@dataclass(frozen=True)
class TrainingCosts:
    """Costs of learning from a rollout, which do not depend on its format."""

    score: Timing  # a pass without gradients over some tokens
    update: Timing  # a forward and backward pass over some tokens
    optimizer: Timing  # one optimizer step


def per_token(shorter: Timing, longer: Timing) -> Range:
    """Estimate the seconds per additional token of the batch between two lengths."""
    before, tokens = shorter.range.middle, longer.size - shorter.size
    return Range(*(max(0.0, (seconds - before) / tokens) for seconds in longer.range))


@dataclass(frozen=True)
class Step:
    """Predicted seconds of each part of a training step."""

    sync: Range  # sending the weights to the engine
    generate: Range
    # the policy's log-probabilities at rollout time; skipped with one update per rollout
    score: Range
    update: Range  # forward passes, backward passes and optimizer steps

    @property
    def total(self) -> Range:
        """Seconds of the whole step."""
        return self.sync + self.generate + self.score + self.update


@dataclass(frozen=True)
class Comparison:
    """Gain of a format over 16-bit rollouts."""

    step: Step  # predicted, in this format
    # of the step, or of rollout and sync only, which is more, if the rest was not measured
    speedup: Range
    rollout_speedup: float  # of generation alone
    # "yes", "no", or "unclear" if the range includes both or the rest of the step is unknown
    advice: str


@dataclass
class Bench:
    """Measurements and predictions."""

    model: str  # name or directory from the command line
    workload: Workload  # the step to predict
    # by format, `"none"` for 16 bits
    measurements: dict[str, EngineCosts] = field(default_factory=dict)
    training: TrainingCosts | None = None  # the rest of a step, if measured
    baseline: Step | None = None  # predicted step with 16-bit rollouts, if those were measured
    # with the baseline, by quantized format
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    # why the rest of a step is not measured, if the policy does not fit
    too_large: str | None = None
    # why a measurement is missing, by format or `"training"`
    failures: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0  # total run time

    def conclude(self) -> None:
        """Predict the steps and compare them, as far as the measurements allow."""
        steps = {
            name: predict_step(costs, self.training, self.workload)
            for name, costs in self.measurements.items()
        }
        self.baseline = before = steps.pop(BASELINE, None)
        if before is not None:
            whole = self.training is not None
            self.comparisons = {name: compare(before, step, whole) for name, step in steps.items()}


def predict_step(engine: EngineCosts, training: TrainingCosts | None, workload: Workload) -> Step:
    """Predict a step: sync, rollout, a scoring pass if there are
    several updates, and the updates.
    """
    sync, generate = engine.sync.range, engine.generate(workload.completion_len)
    if training is None:
        return Step(sync, generate, NOTHING, NOTHING)
    tokens, scored = workload.batch * workload.length, workload.updates > 1
    return Step(
        sync=sync,
        generate=generate,
        score=training.score.range.times(tokens / training.score.size if scored else 0),
        update=training.update.range.times(tokens / training.update.size)
        + training.optimizer.range.times(workload.updates),
    )


def compare(before: Step, after: Step, whole_step: bool) -> Comparison:
    """Compare a step with 16-bit rollouts and one in another format; without `whole_step`, both end
    with the rollout.

    Scoring and updates take the same time in both steps, so their spread does not widen the range
    of the speed-up. Its bounds use the extremes of rollout and sync, and the medians of the rest.
    """
    rest = before.score.middle + before.update.middle
    slow, fast = before.sync + before.generate, after.sync + after.generate
    # the lowest speed-up: the fastest baseline, the slowest format
    pairs = zip(slow, reversed(fast), strict=True)
    speedup = Range(
        *((numerator + rest) / (denominator + rest) for numerator, denominator in pairs)
    )
    advice = "unclear"
    if speedup.high < WORTHWHILE:
        advice = "no"
    elif whole_step and speedup.low >= WORTHWHILE:
        advice = "yes"
    return Comparison(after, speedup, before.generate.middle / after.generate.middle, advice)


def build_table(result: Bench) -> Table:
    """Build a table of the seconds per step by format, within 80 columns."""
    workload = result.workload
    title = (
        f"{result.model}: one step of {workload.batch} completions, {workload.completion_len} "
        "tokens each"
    )
    caption = (
        "Seconds; extrapolated from shorter runs if a whole step would take too long. MB of the "
        "engine's weights."
    )
    figures = ("tok/s", "sync", "rollout", "score", "update", "step", "speed-up", "MB")
    table = new_table(title, caption, ["format"], figures)
    for scheme, measurement in result.measurements.items():
        comparison = result.comparisons.get(scheme)
        step = predict_step(measurement, result.training, workload)
        parts = (
            [step.generate, step.score, step.update, step.total]
            if result.training
            else [step.generate]
        )
        table.add_row(
            label(scheme),
            f"{workload.batch * workload.completion_len / step.generate.middle:.0f}",
            digits(step.sync.middle),
            *(digits(part.middle) for part in parts),
            *["-"] * (4 - len(parts)),
            with_range(comparison.speedup) if comparison else "",
            digits(measurement.weight_bytes / 1e6),
        )
    return table


def sentences(result: Bench) -> list[str]:
    """Return the advice for each format, with its reason."""
    lines = []
    if result.baseline and result.training:
        step = result.baseline
        share = (step.generate.middle + step.sync.middle) / step.total.middle
        lines.append(
            f"Rollouts and their syncs take {share:.0%} of a 16-bit step. If they were free, a "
            f"step would be {1 / (1 - share):.1f} times as fast; no format can do better."
        )
    for scheme, comparison in result.comparisons.items():
        lines.append(
            f"{label(scheme)}: {advice(comparison, whole_step=result.training is not None)}"
        )
    lines += [
        f"{label(part)}: not measured. {failure}" for part, failure in result.failures.items()
    ]
    lines += [result.too_large] if result.too_large else []
    return lines


def advice(comparison: Comparison, whole_step: bool) -> str:
    """Summarize in one sentence whether the format is worth it."""
    gain = with_range(comparison.speedup)
    rollout = f"(rollouts {comparison.rollout_speedup:.2f} times as fast)"
    if comparison.advice == "no":
        measured = "a step is" if whole_step else "rollout and sync are"
        return f"Not worth it for speed: {measured} {gain} times as fast {rollout}."
    if not whole_step:
        return (
            f"Rollout and sync are {gain} times as fast {rollout}. A step gains less, the more "
            "time scoring and updates take."
        )
    if comparison.advice == "yes":
        return f"Worth it: a step is {gain} times as fast {rollout}."
    return (
        f"Unclear: a step is {gain} times as fast {rollout}, and it takes {WORTHWHILE:.2f} to be "
        "worth it."
    )


def with_range(value: Range) -> str:
    """Format a ratio with its range."""
    return f"{value.middle:.2f} ({value.low:.2f}-{value.high:.2f})"


def digits(value: float) -> str:
    """Format seconds or megabytes with three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.1 else f"{value:.3f}"
