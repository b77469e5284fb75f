"""Measured costs as data, and what they say about sizes that were not measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
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


NOTHING = Range(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Timing:
    """Seconds of something whose cost grows with a size.

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
    """What one format of rollouts costs.

    Attributes:
        generation: A whole batch of completions at a few lengths, shortest first; the first has one token, which is
            the cost of the prompts.
        sync: Quantizing all weights and loading them into the engine.
        weight_bytes: Size of the engine's weights.
        start_s: Seconds until the engine was ready.
    """

    generation: list[Timing]
    sync: Timing
    weight_bytes: int
    start_s: float

    def generate(self, tokens: int) -> Range:
        r"""Seconds of generating a batch of completions.

        $$T(L) = T(1) + (L - 1)\,(r + g\,L/2)$$

        With the rate $r$ and its growth $g \ge 0$ with the context taken from the lengths measured. Within them the
        estimate interpolates. Beyond them, the low bound keeps the rate of the longest one.

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
            span = longest.size / 2  # between the middles of the two stretches over which the rates are means
            growth = max(0.0, (late.middle - early.middle) / span)
            added = growth * (tokens - longest.size) / 2
            rate = Range(rate.low, rate.middle + added, rate.high + 2 * added)
        return first.range + rate.times(tokens - 1)

    def tokens_per_second(self, tokens: int, batch: int) -> float:
        """Throughput of a rollout, prompts included."""
        return tokens * batch / self.generate(tokens).middle


@dataclass(frozen=True)
class TrainingCosts:
    """What learning from a rollout costs, whatever its format.

    Attributes:
        score: A pass without gradients, by tokens in it.
        update: A forward and backward pass, by tokens in it.
        optimizer: One step of the optimizer.
    """

    score: list[Timing]
    update: list[Timing]
    optimizer: Timing


def per_token(shorter: Timing, longer: Timing) -> Range:
    """Seconds that each further token of the batch took between two lengths."""
    before, tokens = shorter.range.middle, longer.size - shorter.size
    return Range(*(max(0.0, (seconds - before) / tokens) for seconds in longer.range))


def at_size(timings: Sequence[Timing], size: int) -> Range:
    """Seconds at another size (tokens): a fixed part and one per token, from the two largest of ascending timings."""
    *_, largest = timings
    if size <= largest.size or len(timings) < 2:
        return largest.range.times(size / largest.size)
    return largest.range + per_token(timings[-2], largest).times(size - largest.size)
