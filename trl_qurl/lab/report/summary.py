"""The tables of a report: what each group came to, and in which settings the groups differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from trl_qurl.lab.report.curves import Estimate, estimate, final_value, points_of, rollouts_of
from trl_qurl.lab.report.groups import Group
from trl_qurl.lab.report.labels import shown
from trl_qurl.lab.report.numerals import decimals_of, fixed, numeral, with_error
from trl_qurl.lab.report.questions import KL, LARGEST_RATIO, REGION_CLIPPED, REWARD, Measure
from trl_qurl.lab.report.seconds import seconds_per_rollout
from trl_qurl.lab.report.settings import ABSENT, differing
from trl_qurl.trainers.run_log import Run

NOTHING = "–"
LONGEST_IN_TABLE = 80


class Table(NamedTuple):
    """Texts of a table; the first cell of a row is its heading."""

    header: list[str]
    rows: list[list[str]]


class Column(NamedTuple):
    """One number per run, what it comes to over seeds, and how a column of these is written."""

    heading: str
    value: Callable[[Run], float | None]
    write: Callable[[Sequence[Estimate | None]], list[str]]
    combine: Callable[[Sequence[float]], Estimate | None] = estimate


def summary_table(groups: Sequence[Group], scores: Sequence[Measure]) -> Table:
    """One row per group; numbers are means over its seeds with their confidence intervals.

    Args:
        groups: of the report.
        scores: held-out scores; those never logged get no column, and so do all other metrics.
    """
    columns = [
        *(_at_the_end(measure, _alike) for measure in (*scores, REWARD)),
        _at_the_end(KL._replace(label="KL, nats"), _each),
        Column("Largest ρ", _largest_ratio, _each, combine=_largest),
        _at_the_end(REGION_CLIPPED._replace(label="Clipped, %"), _alike, factor=100),
        Column("Seconds per rollout", lambda run: sum(seconds_per_rollout(run).values()) or None, _alike),
    ]
    estimates = [[_estimate(group, column) for group in groups] for column in columns]
    logged = [(column, found) for column, found in zip(columns, estimates, strict=True) if any(found)]
    texts = [column.write(found) for column, found in logged]
    rows = [
        [group.label, str(len(group.runs)), _lengths(group), *(column[row] for column in texts)]
        for row, group in enumerate(groups)
    ]
    return Table(["Runs", "Seeds", "Rollouts", *(column.heading for column, _ in logged)], rows)


def differences_table(groups: Sequence[Group]) -> Table:
    """One row per group, one column per setting in which groups differ."""
    names = differing([group.settings for group in groups])
    rows = [
        [
            group.label,
            *(shown(group.settings[name], LONGEST_IN_TABLE) if name in group.settings else ABSENT for name in names),
        ]
        for group in groups
    ]
    return Table(["Runs", *names], rows)


def _at_the_end(
    measure: Measure, write: Callable[[Sequence[Estimate | None]], list[str]], factor: float = 1.0
) -> Column:
    def value(run: Run) -> float | None:
        final = final_value(points_of(run, measure.metric))
        return None if final is None else factor * final

    return Column(measure.label, value, write)


def _estimate(group: Group, column: Column) -> Estimate | None:
    values = [column.value(run) for run in group.runs]
    return column.combine([value for value in values if value is not None])


def _largest_ratio(run: Run) -> float | None:
    return max(points_of(run, LARGEST_RATIO.metric).values.tolist(), default=None)


def _largest(values: Sequence[float]) -> Estimate | None:
    return Estimate(max(values), None) if values else None


def _alike(found: Sequence[Estimate | None]) -> list[str]:
    """All to the same decimals, so that they can be compared: three digits of the value, two of the error, or more."""
    decimals = sorted(max(decimals_of(*cell), decimals_of(cell.mean, None)) for cell in found if cell is not None)
    return [NOTHING if cell is None else fixed(*cell, decimals[len(decimals) // 2]) for cell in found]


def _each(found: Sequence[Estimate | None]) -> list[str]:
    """Each to its own digits: they may be orders of magnitude apart."""
    return [NOTHING if cell is None else with_error(*cell) for cell in found]


def _lengths(group: Group) -> str:
    lengths = sorted(rollouts_of(run) for run in group.runs)
    shortest, longest = numeral(lengths[0], digits=6), numeral(lengths[-1], digits=6)
    return longest if shortest == longest else f"{shortest} to {longest}"
