"""Which differences of the study are credible: Holm's correction, other windows, and intervals by
seed.

    python -m benchmarks.objectives.contrasts

An interval of 95 % leaves out zero by chance in one of twenty differences, and the study has
hundreds. Holm's correction says which remain if all of them are tests of one family. A difference
may also depend on how many of the last rollouts are averaged (`WINDOWS`; the tables use 20). And
runs that share a seed are not independent, so a mean over formats or caps gets its interval from
one value per seed, too.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.objectives.arms import EXPERIMENTS
from benchmarks.objectives.study import RESULTS
from benchmarks.objectives.summary import (
    AHEAD,
    CAPS,
    CONTRASTS,
    MEASURES,
    SCHEMES,
    Arms,
    Samples,
    estimate,
    markdown,
    read_arms,
    samples_of,
    stated,
    stated_difference,
)
from trl_qurl.lab.curves import FINAL_ROLLOUTS, points_of
from trl_qurl.lab.runs import Run

WINDOWS = (10, 20, 30, 40, 60)
LEVEL = 0.05

TABLE: dict[str, tuple[str, str, str]] = {
    "naive − BF16": ("main", "{}_naive", "bf16"),
    "tis − BF16": ("main", "{}_tis", "bf16"),
    "acr − BF16": ("main", "{}_acr", "bf16"),
    "quantized_ratio − naive": ("main", "{}_quantized_ratio", "{}_naive"),
    "tis − naive": ("main", "{}_tis", "{}_naive"),
    "acr − tis": ("main", "{}_acr", "{}_tis"),
    "acr with UAQ 1.5 − acr": ("main", "{}_acr_uaq", "{}_acr"),
    "smoothed − not (`tis`)": ("actors", "{}_tis_smoothed", "{}_tis"),
    "stochastic − nearest (`tis`)": ("actors", "{}_stochastic_tis", "{}_tis"),
    "error feedback − nearest (`tis`)": ("actors", "{}_feedback_tis", "{}_tis"),
}
"""Rows of benchmarks/study.md's table of differences: experiment and arms, by format."""

INT8 = {
    "main": ("bf16", "int8_{}", ("naive", "quantized_ratio", "decoupled", "tis", "acr", "acr_uaq")),
    "rloo": ("bf16", "int8_{}", ("naive", "tis")),
    "lora": ("bf16_lora", "int8_lora_{}", ("merged", "adapter", "rounded")),
}
"""Arms with INT8 rollouts, and the arm in BF16 that they are compared with."""

POOLED = {
    "acr − tis, over six caps": [
        ("cap", f"int3a4_acr_c{cap:g}", f"int3a4_tis_c{cap:g}") for cap in CAPS
    ],
    "tis − naive, over six caps": [("cap", f"int3a4_tis_c{cap:g}", "int3a4_naive") for cap in CAPS],
    "one rollout ahead − in time, over objectives": [
        ("ahead", f"bf16_ahead_{name}", "bf16") for name in AHEAD
    ],
    "acr with UAQ 1.5 − acr, over three formats": [
        ("main", f"{name}_acr_uaq", f"{name}_acr") for name in SCHEMES
    ],
}


class Difference(NamedTuple):
    """A difference: its name, and its samples for each window."""

    name: str
    by_window: dict[int, Samples]

    @property
    def samples(self) -> Samples:
        """With the window of the tables."""
        return self.by_window[FINAL_ROLLOUTS]

    def windows(self) -> list[int]:
        """Those with which the interval leaves out zero."""
        return [window for window, samples in self.by_window.items() if p_value(*samples) < LEVEL]


def p_value(values: Sequence[float], others: Sequence[float] = ()) -> float:
    """Two-sided, of Student's t for a mean of zero; 1 for fewer than two values (Abramowitz and
    Stegun 26.7.3-4).
    """
    mean, error, freedom = estimate(values, others) if len(values) > 1 else (0.0, 0.0, 0)
    if error == 0.0:
        return 1.0
    angle = math.atan(abs(mean) / error / math.sqrt(freedom))
    odd = freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    inside = math.sin(angle) * total
    return 1 - ((angle + inside) * 2 / math.pi if odd else inside)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's corrected p-values, in the order of `p_values`."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def difference(
    name: str, arms: Arms, ours: str, theirs: str, measure: Callable[..., float | None]
) -> Difference:
    """Of two arms, in every window."""
    return Difference(
        name, {window: samples_of(arms, ours, theirs, measure, window) for window in WINDOWS}
    )


class Study:
    """The stored runs; each experiment is read once, when it is first needed."""

    def __init__(self, directory: Path = RESULTS) -> None:
        self._directory = directory
        self._read: dict[str, Arms] = {}

    def arms(self, name: str) -> Arms:
        """The arms of an experiment and of the experiment that it is compared with."""
        if name not in self._read:
            experiment = EXPERIMENTS[name]
            beside = self.arms(experiment.beside) if experiment.beside else {}
            self._read[name] = {
                **beside,
                **read_arms(self._directory / name, [arm.name for arm in experiment.arms]),
            }
        return self._read[name]

    def accuracy(self, experiment: str, ours: str, theirs: str, name: str = "") -> Difference:
        """A difference in accuracy of the full-precision policy."""
        return difference(
            name or f"{ours} - {theirs}", self.arms(experiment), ours, theirs, MEASURES["accuracy"]
        )

    def table(self) -> dict[tuple[str, str], Difference]:
        """The differences of `TABLE`, by row and format."""
        cells = {
            (row, scheme): self.accuracy(
                experiment, ours.format(scheme), theirs.format(scheme), f"{scheme.upper()}: {row}"
            )
            for row, (experiment, ours, theirs) in TABLE.items()
            for scheme in SCHEMES
        }
        return {cell: found for cell, found in cells.items() if found.samples[0]}

    def everything(self) -> Iterator[Difference]:
        """Every difference of the study, by every measure, without repeated values."""
        seen = set()
        for experiment, pairs in CONTRASTS.items():
            for ours, theirs in pairs:
                for measure, function in MEASURES.items():
                    name = f"{experiment}: {ours} - {theirs}, {measure}"
                    found = difference(name, self.arms(experiment), ours, theirs, function)
                    if (
                        len(found.samples[0]) > 1
                        and (key := (ours, theirs, *found.samples[0])) not in seen
                    ):
                        seen.add(key)
                        yield found

    def with_int8(self) -> list[Difference]:
        """INT8 rollouts against BF16 rollouts."""
        return [
            self.accuracy(
                experiment, form.format(arm), plain, f"{experiment}: {form.format(arm)} - {plain}"
            )
            for experiment, (plain, form, names) in INT8.items()
            for arm in names
        ]

    def pooled(self, name: str) -> tuple[list[float], list[float]]:
        """The values of all pairs of `POOLED`, and their mean by seed."""
        parts = [self.accuracy(*pair).samples[0] for pair in POOLED[name]]
        by_seed = zip_longest(*parts)  # each has seeds from 0, some fewer
        means = [
            float(np.mean([value for value in values if value is not None])) for values in by_seed
        ]
        return [value for part in parts for value in part], means


def correlation(runs: Mapping[int, Run]) -> float:
    """Mean correlation of the rewards of two seeds, rollout by rollout, about their means over
    eleven rollouts.
    """
    rewards = [points_of(run, "reward").values for run in runs.values()]
    trends = [
        np.convolve(np.pad(values, 5, mode="edge"), np.full(11, 1 / 11), mode="valid")
        for values in rewards
    ]
    found = np.corrcoef(np.array(rewards) - trends)
    return float(found[np.triu_indices(len(found), 1)].mean())


def table_of(differences: Sequence[Difference], only_below: float = math.inf) -> str:
    """One line per difference, the smallest p-value first; Holm's correction is over all of
    `differences`.
    """
    p_values = [p_value(*found.samples) for found in differences]
    lines = [
        (
            found.name,
            str(len(found.samples[0])),
            stated_difference(stated(*found.samples)),
            f"{p:.5f}",
            f"{corrected:.3f}",
            ", ".join(map(str, found.windows())),
        )
        for p, corrected, found in sorted(
            zip(p_values, holm(p_values), differences, strict=True), key=lambda x: x[0]
        )
        if p < only_below
    ]
    return markdown(
        ("difference", "seeds", "mean", "p", "Holm's p", "leaves out zero with windows of"), lines
    )


def main(argv: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--runs", type=Path, default=RESULTS, help="directory that study.py wrote to"
    )
    runs = parser.parse_args(argv).runs
    if not (runs / "main").is_dir() or not (runs / "seeds").is_dir():
        parser.error(f"{runs} lacks main/ or seeds/: compare single runs with `trl-qurl report`.")
    study = Study(runs)
    table, everything = list(study.table().values()), list(study.everything())
    print(f"### The table of study.md: {len(table)} differences in accuracy\n\n{table_of(table)}")
    print(
        f"\n### All {len(everything)} differences; shown are those with p < "
        f"{LEVEL}\n\n{table_of(everything, LEVEL)}"
    )
    titles = {
        "seeds": "Ten independent seeds",
        "one_update": "One update per rollout",
        "centering": "Score centering",
        "in_flight": "Weights sent in flight",
    }
    for experiment, title in titles.items():
        found = [study.accuracy(experiment, *pair) for pair in CONTRASTS[experiment]]
        found = [each for each in found if each.samples[0]]
        print(f"\n### {title}: {len(found)} differences in accuracy\n\n{table_of(found)}")
    print(f"\n### INT8 rollouts against BF16 rollouts\n\n{table_of(study.with_int8())}")
    apart = [f"{name} {correlation(study.arms(name)['bf16']):+.3f}" for name in ("main", "seeds")]
    print(f"\n### Correlation of the rewards of two seeds, BF16\n\n{', '.join(apart)}")
    lines = [
        (
            name,
            *(
                f"{stated_difference(stated(values))} ({len(values)})"
                for values in study.pooled(name)
            ),
        )
        for name in POOLED
    ]
    print(f"\n### Pooled\n\n{markdown(('difference', 'by pairs', 'by seed'), lines)}")


if __name__ == "__main__":
    main()
