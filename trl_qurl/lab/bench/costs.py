"""Measured costs as data, and what they say about sizes that were not measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Range(NamedTuple):
    """A figure with the smallest and largest that the measurements allow."""

    low: float
    middle: float
    high: float

    def __add__(self, other: Range) -> Range:  # type: ignore[override]
        return Range(self.low + other.low, self.middle + other.middle, self.high + other.high)

    def times(self, factor: float) -> Range:
        """Every bound multiplied by something positive."""
        return Range(self.low * factor, self.middle * factor, self.high * factor)


@dataclass(frozen=True)
class Timing:
    """
    Seconds of something whose cost grows with a size.

    Attributes:
        size: What it was measured at (tokens).
        seconds: One figure per repetition.
    """

    size: int
    seconds: list[float]

    @property
    def range(self) -> Range:
        """Fastest, median and slowest repetition."""
        return Range(min(self.seconds), statistics.median(self.seconds), max(self.seconds))


@dataclass(frozen=True)
class EngineCosts:
    """
    What one format of rollouts costs.

    Attributes:
        generation: A whole batch of completions of a few lengths, shortest first; the first has one token, which is
            the cost of the prompts.
        sync: Quantizing all weights and getting them into the engine.
        weight_bytes: Of the weights that the engine holds.
        start_s: Seconds until the engine was there.
    """

    generation: list[Timing]
    sync: Timing
    weight_bytes: int
    start_s: float

    def generate(self, tokens: int) -> Range:
        """
        Seconds of generating a batch of completions.

        $$T(L) = T(1) + (L - 1)\\,(r + g\\,L/2)$$

        With $r$ and the growth $g \\ge 0$ of a token's cost with the context from the lengths measured. Within them
        the estimate interpolates. Beyond them the low bound lets the cost per token stay what it was in the longest
        one.

        Args:
            tokens: Completion length L.
        """
        first, *longer = self.generation
        if not longer or tokens <= 1:
            return first.range
        shorter, longest = ([first, *longer])[-2:]
        rate = per_token(first, longest)
        if tokens <= longest.size or len(longer) < 2:
            return first.range + rate.times(tokens - 1)
        early, late = per_token(first, shorter), per_token(shorter, longest)
        span = longest.size / 2  # between the middles of the two stretches that the rates are means of
        growth = max(0.0, (late.middle - early.middle) / span)
        added = growth * (tokens - longest.size) / 2
        grown = Range(rate.low, rate.middle + added, rate.high + 2 * added)
        return first.range + grown.times(tokens - 1)

    def tokens_per_second(self, tokens: int, batch: int) -> float:
        """Throughput of a rollout, prompts included."""
        return tokens * batch / self.generate(tokens).middle


def per_token(shorter: Timing, longer: Timing) -> Range:
    """Seconds that each further token of the batch took between two lengths."""
    tokens = longer.size - shorter.size
    middle = (longer.range.middle - shorter.range.middle) / tokens
    low = (longer.range.low - shorter.range.middle) / tokens
    high = (longer.range.high - shorter.range.middle) / tokens
    return Range(max(low, 0.0), max(middle, 0.0), max(high, 0.0))


@dataclass(frozen=True)
class TrainingCosts:
    """
    What learning from a rollout costs, whatever its format.

    Attributes:
        score: A pass without gradients, by tokens in it.
        update: A forward and backward pass, by tokens in it.
        optimizer: One step of the optimizer.
    """

    score: list[Timing]
    update: list[Timing]
    optimizer: Timing


def at_size(timings: Sequence[Timing], size: int) -> Range:
    """
    Seconds at another size: a fixed part and one per token, from the two largest sizes measured.

    Args:
        timings: By increasing size.
        size: Tokens asked about.
    """
    *_, largest = timings
    if size <= largest.size or len(timings) < 2:
        return largest.range.times(size / largest.size)
    return largest.range + per_token(timings[-2], largest).times(size - largest.size)


@dataclass(frozen=True)
class Measurement:
    """
    All that a process measured.

    Attributes:
        engine: Costs of its format.
        training: Of the rest of a step, if it was asked.
    """

    engine: EngineCosts
    training: TrainingCosts | None = field(default=None)
