"""Does rounding help a real model to explore? The six comparisons that `study.md` declares.

    python -m benchmarks.real_model_exploration

The arms are those of `real_model.py --updates 1` with weights of few bits, and 16 bits with the
same seeds. A difference is bold if Holm's correction over the six leaves it; the others describe.
With fewer seeds than `SEEDS` nothing is judged, so that looking early decides nothing.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import fmean as mean

from benchmarks.objectives.contrasts import LEVEL, holm, p_value
from benchmarks.objectives.exploration import short
from benchmarks.objectives.summary import (
    Arms,
    Samples,
    markdown,
    plus_minus,
    read_arms,
    samples_of,
    stated,
)
from benchmarks.real_model import ARMS, COARSE, EXPLORING, RESULTS, runs_of
from benchmarks.real_model_tables import rollouts
from trl_qurl.lab.runs import Run

EXPLORATION = RESULTS.with_name("exploration")
Measure = Callable[[Run], float]


def mean_over(metric: str, first: int, last: int) -> Measure:
    """Return a measure of runs: the mean of a metric over rollouts, both ends included."""
    return lambda run: mean(row[metric] for row in rollouts(run)[first - 1 : last])


# Nine were declared. Four bits stopped at three, after a look at two: its actor answers nothing.
SEEDS = {"int6": 9, "int4": 3}
ENTROPY = "entropy, 1-20"
ACCURACY = "accuracy, full precision"
MEASURES: dict[str, Measure] = {
    ENTROPY: mean_over("entropy", 1, 20),
    "entropy, 21-40": mean_over("entropy", 21, 40),
    "actor's reward, 1-20": mean_over("reward", 1, 20),
    "actor's reward, 21-40": mean_over("reward", 21, 40),
    ACCURACY: lambda run: run.settings["full_precision"],
    "KL, 1-20": mean_over("mismatch/kl_k3", 1, 20),
}
PAIRS: list[tuple[str, str]] = []
for scheme in COARSE:
    PAIRS += [(f"{scheme}_{name}", "bf16") for name in EXPLORING]
    PAIRS.append((f"{scheme}_naive_then_tis", f"{scheme}_tis"))


def is_declared(ours: str, theirs: str, measure: str) -> bool:
    """Return whether a difference is one of the six."""
    if measure == ENTROPY:
        return ours.endswith("_naive")
    return measure == ACCURACY and ours.endswith("_naive_then_tis")


def table(arms: Arms) -> str:
    """Return the values of 16 bits, and a line per difference."""
    plain = arms["bf16"].values()
    values = [short(plus_minus(stated(map(measure, plain)))) for measure in MEASURES.values()]
    found: dict[tuple[str, str, str], Samples] = {
        (*pair, title): samples_of(arms, *pair, measure)
        for pair in PAIRS
        for title, measure in MEASURES.items()
    }
    declared = [key for key in found if is_declared(*key)]
    clear = set()
    if all(len(found[key][0]) == SEEDS[scheme_of(key[0])] for key in declared):
        p_values = holm([p_value(*found[key]) for key in declared])
        clear = {key for key, p in zip(declared, p_values, strict=True) if p < LEVEL}

    def cell(key: tuple[str, str, str]) -> str:
        shown = short(plus_minus(stated(*found[key]), "+.3f"))
        return f"**{shown}**" if key in clear else shown

    lines = [["16 bits", str(len(plain)), *values]]
    for ours, theirs in PAIRS:
        seeds = str(len(found[ours, theirs, ENTROPY][0]))
        cells = [cell((ours, theirs, title)) for title in MEASURES]
        lines.append([f"{named(ours)} − {named(theirs)}", seeds, *cells])
    return markdown(["rollouts", "seeds", *MEASURES], lines)


def scheme_of(arm: str) -> str:
    """Return the format of an arm's rollouts."""
    return arm.partition("_")[0]


def named(arm: str) -> str:
    """Return an arm's name as the page prints it."""
    scheme, _, name = arm.partition("_")
    return f"{scheme.upper()}, {name.replace('_then_', ', then ')}" if name else "16 bits"


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=Path, default=EXPLORATION, help="directory that real_model.py wrote to"
    )
    directory = parser.parse_args(argv).runs / runs_of("arithmetic", updates=1)
    print(table(read_arms(directory, list(ARMS))))
    print(f"\nBold: Holm's p, of six declared differences, is below {LEVEL}; seeds: {SEEDS}.")


if __name__ == "__main__":
    main()
