"""Which runs of the study would the mismatch guard have acted on, and when?

    python -m benchmarks.guard

It replays the logs in `benchmarks/objectives/runs` and `benchmarks/results/real_model` through the
guard itself, with its default thresholds. Each arm is expected to be healthy, harmed, or
collapsing. An alarm in a healthy run fails (exit status 1). Arms that the guard acted on are left
out: they show what happens after an alarm.

The logs are older than some metrics (`completed`): the mean of ρ follows from both KLs, but shares
of contradicted tokens are not judged.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.objectives.arms import EXPERIMENTS, Arm
from benchmarks.objectives.coarse import CODE_BITS
from benchmarks.objectives.study import RESULTS
from benchmarks.provenance import provenance, write_record
from benchmarks.real_model import RESULTS as REAL_RESULTS
from trl_qurl.config.rollout import QuantizedRolloutsConfig
from trl_qurl.lab.runs import Run, read_run
from trl_qurl.trainers.checks.guard import (
    CONTRADICTED,
    ERRORS,
    ESS,
    KL,
    KL_ERROR,
    RATIO,
    TAIL,
    TOKENS,
    WINDOW,
    MismatchGuard,
)

COLLAPSED = "int8_float32_codes_quantized_ratio"
HEALTHY, UNCLEAR, HARMED, COLLAPSING = ("healthy", "harmed, KL as healthy", "harmed", "collapsing")
UNSMOOTHED = "not smoothed: either"
STALE = "one rollout old: either"
# scored tokens per rollout: of the tiny model, and of the real one once its answers are short
TINY, REAL = 1280, 300
EXPECTED = (HEALTHY, UNCLEAR, HARMED, COLLAPSING, UNSMOOTHED, STALE)


def expectation(arm: Arm) -> str:
    """Classify an arm by its settings."""
    if arm.is_delayed or arm.is_updated_in_flight:
        return STALE
    same_weights = arm.scheme is None or "round_base" in arm.changed
    # int3_stochastic: the same codes, chosen otherwise
    codes = (arm.scheme or "").partition("_")[0]
    if same_weights or (codes not in CODE_BITS and arm.activation_bits == 8):
        return HEALTHY
    if arm.changed.get("objective") == "quantized_ratio":
        return COLLAPSING if codes == "int3" else UNCLEAR
    return HEALTHY if codes == "int4" else HARMED


def real_expectation(arm: str) -> str:
    """Expectation for an arm of the real model's study. Without smoothing, INT8's correction
    decides about harm.
    """
    if arm == COLLAPSED:
        return COLLAPSING
    return UNSMOOTHED if "plain" in arm or arm == "int8_rounded_base" else HEALTHY


@dataclass
class Group:
    """The runs of one arm."""

    experiment: str
    arm: str
    expected: str
    first_alarms: list[int | None] = field(default_factory=list)  # rollouts, by run
    stopped: int = 0  # runs with a contradiction where a check is due
    farthest: dict[str, float] = field(default_factory=dict)  # worst of all runs, by metric


class Replay(NamedTuple):
    """What a guard makes of a run."""

    first_alarm: int | None  # the rollout that turns the alarm on first, counted from 1
    is_stopped: bool  # by a contradiction where a check is due
    # The worst of each metric: the medians that the guard judges, the largest KL less what counts
    # as noise, and the mean of ρ that is farthest from 1.
    farthest: dict[str, float]


def formats_of(run: Run) -> str | None:
    """Return a format with as many bits for a run's weights as the study's codes."""
    name = run.settings["rollout_quantization"]
    codes = (name or "").partition("_")[0]
    return "w4a16" if codes in CODE_BITS else name and codes


def replay(run: Run, tokens: int) -> Replay:
    """Show each rollout to a guard."""
    # the cap's name in logs until November 2026
    older = run.settings.get("vllm_importance_sampling_clip_max", 2.0)
    settings = SimpleNamespace(
        mismatch_guard="warn",
        mismatch_guard_kl=QuantizedRolloutsConfig.mismatch_guard_kl,
        rollout_quantization=formats_of(run),
        round_base=False,
        temperature=1.0,
        vllm_engine_kwargs=None,
        importance_cap=run.settings.get("importance_cap", older),
    )
    guard = MismatchGuard(settings)
    rollouts = [completed(row, tokens) for row in run.rows if KL in row]
    alarms, stops = [], []
    for number, row in enumerate(rollouts, start=1):
        is_due = (number - 1) % QuantizedRolloutsConfig.sync_check_interval == 0
        if is_due and guard.contradiction(row):
            stops.append(number)
        if guard.judge(row):
            alarms.append(number)
    farthest = {name: worst(name, rollouts) for name in (TAIL, ESS)}
    farthest[KL] = max(row[KL] - ERRORS * row[KL_ERROR] for row in rollouts)
    farthest[RATIO] = max(abs(row[RATIO] - 1) for row in rollouts)
    return Replay(alarms[0] if alarms else None, bool(stops), farthest)


def completed(row: dict[str, Any], tokens: int) -> dict[str, Any]:
    """A row with the metrics that its log lacks.

    With k3 ≈ log² ρ / 2, Hölder's inequality gives the smallest error that the KL can have next to
    the mean of
    |log ρ|: mean(k3²) ≥ 2 KL³ / mean(|log ρ|)². That is the strictest guard.
    """
    kl, size = row[KL], row.get("sampling/sampling_logp_difference/mean")
    error = math.sqrt(2 * kl**3 / (size**2 * tokens)) if size else 0.0
    mean = 1 + kl - row.get("mismatch/kl_k1", kl)
    return {RATIO: mean, KL_ERROR: error, TOKENS: tokens, CONTRADICTED: 0.0} | row


def worst(name: str, rollouts: Sequence[dict[str, Any]]) -> float:
    """The median of `WINDOW` rollouts that is farthest from a metric's ideal; of the tail, the mean
    where it is less.
    """
    windows = torch.tensor([row[name] for row in rollouts]).double().unfold(0, WINDOW, 1)
    medians = windows.median(dim=1).values
    if name == TAIL:
        medians = medians.minimum(windows.mean(dim=1))
    return (medians.min() if name == ESS else medians.max()).item()


def replay_all(directory: Path, real: Path) -> list[Group]:
    """Replay every stored run."""
    groups = [
        replay_group(
            Group(f"real {task.name}", arm, real_expectation(arm)),
            sorted(task.glob(f"{arm}-seed*")),
            REAL,
        )
        for task in sorted(real.iterdir())
        for arm in sorted({path.name.rpartition("-seed")[0] for path in task.iterdir()})
        if not arm.endswith("_untrained")  # a single rollout
    ]
    for name, experiment in EXPERIMENTS.items():
        for arm in experiment.arms:
            paths = sorted((directory / name).glob(f"{arm.name}-seed*.jsonl.gz"))
            if paths:
                groups.append(replay_group(Group(name, arm.name, expectation(arm)), paths))
    return groups


def replay_group(group: Group, paths: Sequence[Path], tokens: int = TINY) -> Group:
    """Add the runs of one arm to its group."""
    for path in paths:
        replayed = replay(read_run(path), tokens)
        group.first_alarms.append(replayed.first_alarm)
        group.stopped += replayed.is_stopped
        for metric, value in replayed.farthest.items():
            farther = min if metric == ESS else max
            group.farthest[metric] = farther(group.farthest.get(metric, value), value)
    return group


def alarms(groups: Sequence[Group]) -> list[int]:
    """First alarms, of the runs that have one."""
    return [alarm for group in groups for alarm in group.first_alarms if alarm is not None]


def build_table(groups: Sequence[Group]) -> Table:
    """One line per arm, and one per expectation."""
    table = Table(
        title="The mismatch guard on the study's runs: worst rollouts, and worst medians of five",
        box=box.SIMPLE_HEAD,
    )
    for heading in (
        "experiment",
        "arm",
        "expected",
        "runs",
        "alarms",
        "first alarm",
        "stopped",
        "KL",
        "|ρ - 1|",
        "ρ > C",
        "ESS",
    ):
        left = heading in ("experiment", "arm", "expected")
        table.add_column(heading, justify="left" if left else "right", no_wrap=left)
    for group in groups:
        table.add_row(group.experiment, group.arm, *cells(group.expected, [group]))
    table.add_section()
    for expected in EXPECTED:
        some = [group for group in groups if group.expected == expected]
        if some:
            table.add_row("all", "", *cells(expected, some))
    return table


def cells(expected: str, groups: Sequence[Group]) -> list[str]:
    """A line's figures."""
    found = alarms(groups)
    when = f"{min(found)}-{max(found)}" if found else ""
    runs = sum(len(group.first_alarms) for group in groups)
    kl, bias, tail = (
        max(group.farthest[metric] for group in groups) for metric in (KL, RATIO, TAIL)
    )
    ess = min(group.farthest[ESS] for group in groups)
    return [
        expected,
        str(runs),
        str(len(found)),
        when,
        str(sum(group.stopped for group in groups)),
        f"{kl:.2g}",
        f"{bias:.2g}",
        f"{tail:.2g}",
        f"{ess:.3f}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Replay, print the table, and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=Path, default=RESULTS, help="directory that study.py wrote to"
    )
    parser.add_argument(
        "--real-runs", type=Path, default=REAL_RESULTS, help="directory that real_model.py wrote to"
    )
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args(argv)
    record: dict[str, Any] = {
        "benchmark": "guard",
        **provenance(torch.device("cpu"), "trl_qurl.trainers.checks.guard.py"),
    }
    groups = replay_all(args.runs, args.real_runs)
    record["results"] = [vars(group) for group in groups]
    console = Console(width=max(Console().width, 150))
    console.print(build_table(groups))
    console.print(f"Written to {write_record(record, args.output)}")
    wrong = [group for group in groups if group.expected == HEALTHY and alarms([group])]
    for group in wrong:
        console.print(f"An alarm in a healthy run: {group.experiment}/{group.arm}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
