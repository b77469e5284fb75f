"""Measured costs, and estimates for sizes that were not measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


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
        generation: Generating a whole batch at a few completion lengths, shortest first; the first length, one token,
            gives the cost of the prompts.
        sync: Quantizing all weights and loading them into the engine.
        weight_bytes: Size of the engine's weights.
        start_s: Engine startup time in seconds.
    """

    generation: list[Timing]
    sync: Timing
    weight_bytes: int
    start_s: float

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
        first, *longer = self.generation
        if not longer or tokens <= 1:
            return first.range
        shorter, longest = ([first, *longer])[-2:]
        rate = per_token(first, longest)
        if tokens > longest.size and len(longer) > 1:
            early, late = per_token(first, shorter), per_token(shorter, longest)
            span = longest.size / 2  # between the midpoints of the two intervals over which the rates are averages
            growth = max(0.0, (late.middle - early.middle) / span)
            added = growth * (tokens - longest.size) / 2
            rate = Range(rate.low, rate.middle + added, rate.high + 2 * added)
        return first.range + rate.times(tokens - 1)

    def tokens_per_second(self, tokens: int, batch: int) -> float:
        """Estimate the throughput of a rollout, including its prompts."""
        return tokens * batch / self.generate(tokens).middle


@dataclass(frozen=True)
class TrainingCosts:
    """Costs of learning from a rollout, which do not depend on its format.

    Attributes:
        score: Passes without gradients, by number of tokens.
        update: Forward and backward passes, by number of tokens.
        optimizer: One optimizer step.
    """

    score: list[Timing]
    update: list[Timing]
    optimizer: Timing


def per_token(shorter: Timing, longer: Timing) -> Range:
    """Estimate the seconds per additional token of the batch between two lengths."""
    before, tokens = shorter.range.middle, longer.size - shorter.size
    return Range(*(max(0.0, (seconds - before) / tokens) for seconds in longer.range))


def at_size(timings: Sequence[Timing], size: int) -> Range:
    """Estimate the seconds at another size (tokens), linearly from the two largest of the ascending timings."""
    *_, largest = timings
    if size <= largest.size or len(timings) < 2:
        return largest.range.times(size / largest.size)
    return largest.range + per_token(timings[-2], largest).times(size - largest.size)
