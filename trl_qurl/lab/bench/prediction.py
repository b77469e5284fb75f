"""Measured costs, estimates for sizes that were not measured, and the step and the advice that follow from them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import NamedTuple

from trl_qurl.lab.bench.workload import Workload

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
    """Durations of an operation at one size.

    Attributes:
        size: Size of the operation, in tokens.
        seconds: Duration of each repetition.
    """

    size: int
    seconds: list[float]

    @property
    def range(self) -> Range:
        """The fastest, median and slowest repetition."""
        return Range(min(self.seconds), statistics.median(self.seconds), max(self.seconds))


@dataclass(frozen=True)
class EngineCosts:
    """Costs of rollouts in one format.

    Attributes:
        generation: Generating a whole batch at three completion lengths, shortest first; the first length, one token,
            gives the cost of the prompts.
        sync: Quantizing all weights and loading them into the engine.
        weight_bytes: Size of the engine's weights.
    """

    generation: list[Timing]
    sync: Timing
    weight_bytes: int

    def generate(self, tokens: int) -> Range:
        r"""Estimate the seconds to generate a batch of completions.

        $$T(L) = T(1) + (L - 1)\,(r + g\,L/2)$$

        Where the rate $r$ and its growth with the context $g \ge 0$ come from the measured lengths. Between these
        lengths the estimate interpolates; beyond them, the low bound keeps the rate of the longest one.

        Args:
            tokens: Completion length L.

        Returns:
            The estimate with its bounds.
        """
        first, short, longest = self.generation
        rate = per_token(first, longest)
        if tokens > longest.size:
            early, late = per_token(first, short), per_token(short, longest)
            span = longest.size / 2  # between the midpoints of the two intervals over which the rates are averages
            growth = max(0.0, (late.middle - early.middle) / span)
            added = growth * (tokens - longest.size) / 2
            rate = Range(rate.low, rate.middle + added, rate.high + 2 * added)
        return first.range + rate.times(tokens - 1)


@dataclass(frozen=True)
class TrainingCosts:
    """Costs of learning from a rollout, which do not depend on its format.

    Attributes:
        score: A pass without gradients over some tokens.
        update: A forward and backward pass over some tokens.
        optimizer: One optimizer step.
    """

    score: Timing
    update: Timing
    optimizer: Timing


def per_token(shorter: Timing, longer: Timing) -> Range:
    """Estimate the seconds per additional token of the batch between two lengths."""
    before, tokens = shorter.range.middle, longer.size - shorter.size
    return Range(*(max(0.0, (seconds - before) / tokens) for seconds in longer.range))


@dataclass(frozen=True)
class Step:
    """Predicted seconds of each part of a training step.

    Attributes:
        sync: Sending the weights to the engine.
        generate: Generating the rollout.
        score: Computing the policy's log-probabilities at rollout time; skipped with one update per rollout.
        update: Forward passes, backward passes and optimizer steps.
    """

    sync: Range
    generate: Range
    score: Range
    update: Range

    @property
    def total(self) -> Range:
        """Seconds of the whole step."""
        return self.sync + self.generate + self.score + self.update

    @property
    def rollout_share(self) -> float:
        """Share of generation and sync in the step: an upper bound on what faster rollouts can save."""
        return (self.generate.middle + self.sync.middle) / self.total.middle


@dataclass(frozen=True)
class Comparison:
    """Gain of a format over 16-bit rollouts.

    Attributes:
        step: Predicted step in this format.
        speedup: Speed-up of the step.
        rollout_speedup: Speed-up of generation alone.
        training_limit: Only if scoring and updates were not measured: the most seconds they may take for a worthwhile
            speed-up. `speedup` then covers rollout and sync only, an upper bound on that of a step.
        advice: `"yes"`, `"no"`, `"unclear"` if the range includes both, or `"depends"` on `training_limit`.
    """

    step: Step
    speedup: Range
    rollout_speedup: float
    training_limit: float | None
    advice: str


def predict_step(engine: EngineCosts, training: TrainingCosts | None, workload: Workload) -> Step:
    """Predict a step: sync, rollout, a scoring pass if there are several updates, and the updates."""
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


def compare(
    baseline: EngineCosts, engine: EngineCosts, training: TrainingCosts | None, workload: Workload
) -> Comparison:
    """Compare a format with 16-bit rollouts.

    Scoring and updates take the same time in both steps, so their spread does not widen the range of the speed-up.
    Its bounds use the extremes of rollout and sync, and the medians of the rest.
    """
    before, after = predict_step(baseline, training, workload), predict_step(engine, training, workload)
    rest = before.score.middle + before.update.middle
    slow, fast = before.sync + before.generate, after.sync + after.generate
    pairs = zip(slow, reversed(fast), strict=True)  # the lowest speed-up: the fastest baseline, the slowest format
    speedup = Range(*((numerator + rest) / (denominator + rest) for numerator, denominator in pairs))
    limit = None
    if training is None:  # (slow + limit) / (fast + limit) = WORTHWHILE
        limit = (slow.middle - WORTHWHILE * fast.middle) / (WORTHWHILE - 1)
    return Comparison(after, speedup, before.generate.middle / after.generate.middle, limit, advise(speedup, limit))


def advise(speedup: Range, training_limit: float | None) -> str:
    """Return the `advice` of a `Comparison`."""
    if training_limit is not None:
        return "depends" if training_limit > 0 else "no"
    if speedup.low >= WORTHWHILE:
        return "yes"
    return "no" if speedup.high < WORTHWHILE else "unclear"
