"""How many runs does a difference need? From the spread of stored runs of `real_model.py`.

    python -m benchmarks.real_model_design          # for a difference of .03, found in four of five
    studies python -m benchmarks.real_model_design --runs DIRECTORY --difference .05

The spread is pooled over arms that learn alike (`ALIKE`). *Within* is what a repeated measurement
of the same policy would vary by at most: answers are right or wrong. Pairs are runs of two arms
with the same seed, so with the same questions in the same order. Pairs: n = ((z(.975) + z(.8)) s /
d)² + z(.975)² / 2, where s is the spread of the difference d and the last term stands for Student's
t instead of the normal distribution (Guenther 1981). For runs per arm without pairs, s is √2 times
the spread of a run, and the last term half as large. In brackets: pairs for both ends of a 95 %
interval of s (Wilson and Hilferty). Teacher forcing gives no exact accuracy here: the chat model
words its answers ("The answer is 12."), so that the shortest right ones have a probability of
0.0002 when .96 of its samples are right.
"""

import argparse
import math
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from statistics import NormalDist, fmean, stdev

from benchmarks.objectives.summary import STRANGERS, Arms, markdown, read_arms
from benchmarks.real_model import ARMS, RESULTS
from benchmarks.real_model_tables import MEASURES
from trl_qurl.lab.runs import Run

ALIKE = ("bf16", "bf16_again", "int8_naive", "int8_tis", "int8_acr")
COMPLETIONS = 32
ANSWERS = {
    "reward, first 20": 20 * COMPLETIONS,
    "last ten": 10 * COMPLETIONS,
    "accuracy": 256,
    "full precision": 256,
}
"""Right or wrong answers in each measure."""


def runs_needed(
    spread: float, difference: float, samples: int = 1, power: float = 0.8, level: float = 0.05
) -> int:
    """Pairs, or runs in each of two samples, with which a difference of this size is significant so
    often.
    """
    normal = NormalDist()
    z, other = normal.inv_cdf(1 - level / 2), normal.inv_cdf(power)
    return math.ceil(((z + other) * spread / difference) ** 2 + z**2 / 2 / samples)


def spread_interval(spread: float, freedom: int) -> list[float]:
    """Both ends of the 95 % interval of a standard deviation."""
    error = 2 / (9 * freedom)
    chi_squared = [freedom * (1 - error + z * math.sqrt(error)) ** 3 for z in (1.96, -1.96)]
    return [spread * math.sqrt(freedom / value) for value in chi_squared]


def pooled(groups: list[list[float]]) -> float:
    """The standard deviation within groups, each about its own mean."""
    groups = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in groups)
    return math.sqrt(sum((len(group) - 1) * stdev(group) ** 2 for group in groups) / freedom)


def row(
    name: str, measure: Callable[[Run], float], arms: Arms, difference: float
) -> tuple[str, ...]:
    """One line of the table."""
    values = {
        arm: {seed: measure(run) for seed, run in by_seed.items()} for arm, by_seed in arms.items()
    }
    seeds = pooled([list(by_seed.values()) for by_seed in values.values()])
    mean = fmean(value for by_seed in values.values() for value in by_seed.values())
    within = math.sqrt(mean * (1 - mean) / ANSWERS[name]) if name in ANSWERS else 0.0
    pairs = pooled(
        [
            [values[a][seed] - values[b][seed] for seed in values[a].keys() & values[b].keys()]
            for a, b in combinations([arm for arm in values if arm not in STRANGERS], 2)
        ]
    )
    alone = runs_needed(math.sqrt(2) * seeds, difference, samples=2)
    figures = (f"{mean:.3f}", f"{seeds:.3f}", f"{within:.3f}", f"{pairs:.3f}", str(alone))
    paired = [by_seed.keys() for arm, by_seed in values.items() if arm not in STRANGERS]
    freedom = sum(map(len, paired)) - len(paired) - len(set().union(*paired)) + 1
    low, high = (runs_needed(each, difference) for each in spread_interval(pairs, freedom))
    return (name, *figures, f"{runs_needed(pairs, difference)} ({low}-{high})")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default="arithmetic", help="default: arithmetic")
    parser.add_argument(
        "--runs", type=Path, default=RESULTS, help="directory that real_model.py wrote to"
    )
    parser.add_argument(
        "--difference", type=float, default=0.03, help="to be found (default: %(default)s)"
    )
    args = parser.parse_args()
    arms = read_arms(args.runs / args.task, [name for name in ALIKE if name in ARMS])
    headings = ("measure", "mean", "SD of seeds", "within", "SD of pairs", "runs per arm", "pairs")
    print(
        markdown(
            headings,
            [row(name, measure, arms, args.difference) for name, measure in MEASURES.items()],
        )
    )


if __name__ == "__main__":
    main()
