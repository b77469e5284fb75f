"""Does rounding help the policy explore? Stored runs, early and later, compared with 16 bits.

    python -m benchmarks.objectives.exploration

Two papers say that it does (QeRL, arXiv 2510.11696; AIS, arXiv 2605.13907). Entropy is the
policy's, on the tokens of the actor. A difference is bold if Holm's correction over all of them,
both tables together, leaves it. That of 16 bits with other seeds is the floor, and no comparison.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.objectives.contrasts import LEVEL, Study, holm, p_value
from benchmarks.objectives.study import RESULTS
from benchmarks.objectives.summary import (
    ACCURACY,
    Samples,
    markdown,
    plus_minus,
    samples_of,
    stated,
)
from trl_qurl.lab.curves import points_of
from trl_qurl.lab.runs import Run

EXPERIMENTS = {"one_update": "One update per rollout", "seeds": "Four updates per rollout"}
WINDOWS = ((1, 20), (41, 60))  # rollouts, both included
METRICS = {"entropy": "entropy", "actor's reward": "reward", "policy's accuracy": ACCURACY}
COLUMNS = [(title, window) for title in METRICS for window in WINDOWS]

FLOOR = "16 bits, other seeds − 16 bits"
PAIRS = {
    FLOOR: ("bf16_again", "bf16"),
    "INT8, the default − 16 bits": ("int8_default", "bf16"),
    "INT3, naive − 16 bits": ("int3_naive", "bf16"),
    "INT3, tis − 16 bits": ("int3_tis", "bf16"),
    "INT3, tis − naive": ("int3_tis", "int3_naive"),
}

Key = tuple[str, str, tuple[str, tuple[int, int]]]
"""Experiment, pair and column."""


def mean_over(title: str, window: tuple[int, int]) -> Callable[[Run], float]:
    """Return a measure of runs: the mean of a metric over the rollouts of a window."""

    def measure(run: Run) -> float:
        rollouts, values = points_of(run, METRICS[title])
        return float(values[(rollouts >= window[0]) & (rollouts <= window[1])].mean())

    return measure


class Exploration:
    """All differences, and what Holm's correction leaves of them."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self.samples: dict[Key, Samples] = {
            (experiment, pair, column): samples_of(
                study.arms(experiment), *PAIRS[pair], mean_over(*column)
            )
            for experiment in EXPERIMENTS
            for pair in PAIRS
            for column in COLUMNS
        }
        compared = [key for key in self.samples if key[1] != FLOOR]
        corrected = holm([p_value(*self.samples[key]) for key in compared])
        self.p_values = dict(zip(compared, corrected, strict=True))

    def table(self, experiment: str) -> str:
        """Return the values of 16 bits, and a line per difference."""
        headings = [f"{title}, {first}-{last}" for title, (first, last) in COLUMNS]
        plain = self._study.arms(experiment)["bf16"].values()
        values = [short(plus_minus(stated(map(mean_over(*column), plain)))) for column in COLUMNS]
        lines = [["16 bits", *values]]
        for pair in PAIRS:
            lines.append([pair, *(self._cell((experiment, pair, column)) for column in COLUMNS)])
        return markdown(["rollouts", *headings], lines)

    def _cell(self, key: Key) -> str:
        shown = short(plus_minus(stated(*self.samples[key]), "+.3f"))
        return f"**{shown}**" if self.p_values.get(key, 1.0) < LEVEL else shown


def short(figures: str) -> str:
    """Return figures below 1 as the pages print them."""
    figures = figures.replace("0.", ".").replace("-", "−")
    return figures.replace("+.000", ".000").replace("−.000", ".000")


def main(argv: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--runs", type=Path, default=RESULTS, help="directory that study.py wrote to"
    )
    found = Exploration(Study(parser.parse_args(argv).runs))
    for experiment, title in EXPERIMENTS.items():
        print(f"\n### {title}\n\n{found.table(experiment)}")
    print(f"\nBold: Holm's p, of {len(found.p_values)} differences, is below {LEVEL}.")


if __name__ == "__main__":
    main()
