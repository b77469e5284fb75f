"""From the seconds of steps to a table, and one sentence per format."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from trl_qurl.lab.comparison import label, new_table

if TYPE_CHECKING:
    from rich.table import Table

Step = dict[str, float]
"""Seconds of a step and of its parts, and the peak of its process's memory so far, in GB.

`host` is the part of `rollout` outside of the engine; a server does not show it.
"""

DOUBT = 0.05
FEWEST = 6  # pairs, so that their whole range leaves less doubt than that


class Speedup(NamedTuple):
    """How many times as fast."""

    low: float
    middle: float
    high: float
    pairs: int

    def __str__(self) -> str:
        extent = f" ({self.low:.2f} to {self.high:.2f})" if self.pairs > 1 else ""
        return f"{self.middle:.2f}{extent}"


def speedup(before: Sequence[float], after: Sequence[float]) -> Speedup:
    """Compare the seconds of pairs of steps: the median ratio, and a range.

    From six pairs on, the range holds the median with a confidence of 95 %, whatever the
    distribution: a ratio is above the median with a probability of one half. Fewer pairs give the
    smallest and the largest ratio.
    """
    ratios = sorted(one / other for one, other in zip(before, after, strict=False))
    pairs = len(ratios)
    outside = 0  # ratios on each side that are no part of the range
    doubt = 2 / 2**pairs
    while True:
        doubt += 2 * math.comb(pairs, outside + 1) / 2**pairs
        if doubt > DOUBT:
            break
        outside += 1
    return Speedup(ratios[outside], statistics.median(ratios), ratios[-1 - outside], pairs)


def verdict(name: str, gain: Speedup, what: str) -> str:
    """Say in a sentence whether a format makes `what` faster."""
    if gain.pairs < FEWEST:
        return (
            f"{name} is open: {gain.pairs} of the {FEWEST} pairs that a verdict takes (--minutes, "
            f"or a smaller load). So far {what} is {gain} times as fast."
        )
    if gain.low > 1:
        return f"{name} makes {what} {gain} times as fast."
    if gain.high < 1:
        return f"{name} makes {what} slower: {gain} times as fast."
    return f"{name}: no difference larger than the noise: {what} is {gain} times as fast."


def cost(name: str, rollout: float, host: float, tokens: int) -> str:
    """Say how long a token takes inside and outside of the engine, from a rollout's seconds."""
    inside = 1e6 * (rollout - host) / tokens
    outside = 1e6 * host / tokens
    return (
        f"{name}: a token takes {inside:.1f} us in the engine's steps, and {outside:.1f} us of the "
        "host's time around them."
    )


def compare(steps: Mapping[str, Sequence[Step]], tokens: int) -> tuple[Table, list[str]]:
    """Return a row of medians for each format, and sentences: what a token costs in each, and how
    each compares with the first.

    `tokens` are those of a rollout. An engine alone has only rollouts.
    """
    parts = ["sync", "rollout", "score", "update", "step"]
    table = new_table("Seconds", "", ["format"], ["tok/s", *parts, "GB", "times as fast"])
    costs = []
    verdicts = []
    first: Sequence[Step] = []
    for name, taken in steps.items():
        medians = {part: statistics.median(step[part] for step in taken) for part in taken[0]}
        whole = "step" if "step" in medians else "rollout"
        compared = ""
        if first:
            gain = speedup([step[whole] for step in first], [step[whole] for step in taken])
            compared = str(gain)
            verdicts.append(verdict(label(name), gain, f"a {whole}"))
        else:
            first = taken
        if "host" in medians:
            costs.append(cost(label(name), medians["rollout"], medians["host"], tokens))
        figures = [f"{medians[part]:.3g}" if part in medians else "-" for part in parts]
        rate = f"{tokens / medians['rollout']:.0f}"
        table.add_row(label(name), rate, *figures, f"{taken[-1]['peak']:.1f}", compared)
    return table, costs + verdicts
