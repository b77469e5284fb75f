"""Options of `trl-qurl doctor`, and its checks in order: inspections first, then real trials."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from trl_qurl.lab.comparison import read_schemes, split_schemes
from trl_qurl.lab.doctor.child import check_in_child
from trl_qurl.lab.doctor.environment import INSPECTIONS
from trl_qurl.lab.doctor.report import Evidence, Line, Status, as_json, as_text


class Trial(NamedTuple):
    """A check that starts an engine."""

    name: str
    module: str
    least_gpus: int


TRIALS = (
    Trial("server", "server", 0),
    Trial("graphs", "fresh", 1),
    Trial("sleep", "fresh", 1),
    Trial("nccl", "server", 2),
)
"""Trials in the first format. Training is tried in each format."""

IMPORT_SECONDS = 120.0  # time limit for importing torch
TRIAL_SECONDS = 600.0  # per trial; most of it is for compiling on a slow machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl doctor`."""
    parser.epilog = (
        "docs/troubleshooting.md explains each line. The exit status is 1 if a required check "
        "fails."
    )
    parser.add_argument("--quick", action="store_true", help="skip the trials, which start engines")
    parser.add_argument(
        "--json", action="store_true", help="print JSON for bug reports: no secrets, no home paths"
    )
    parser.add_argument(
        "--scheme",
        type=split_schemes,
        metavar="FORMAT[,FORMAT...]",
        default=[],
        help=(
            "formats to train in; none means 16 bits (default: the first that this machine has "
            "kernels for)"
        ),
    )


def run(args: argparse.Namespace) -> int:
    """Run the checks and print each line as soon as it is ready."""
    with suppress(ImportError, OSError):  # if torch cannot be imported, the report says so
        read_schemes(args.scheme)
    lines: list[Line] = []
    for line in examine(args.scheme, args.quick):
        if not args.json:
            if not lines or line.evidence is not lines[-1].evidence:
                print(f"{line.evidence}:")
            print(as_text(line), flush=True)
        lines.append(line)
    failures = [line.name for line in lines if line.status is Status.FAILED]
    if args.json:
        print(as_json(lines))
    elif failures:
        print(f"FAILED: {', '.join(failures)}.")
    else:
        print("No check failed.")
    return 1 if failures else 0


def examine(formats: Sequence[str], quick: bool) -> Iterator[Line]:
    """Yield the result of each check; standard error announces those that take long."""
    failed: set[str] = set()  # names of lines
    for check in INSPECTIONS:
        name = check.__name__.removeprefix("check_")
        try:
            line = check()
        except Exception as error:  # the other lines are still useful
            text = f"could not be determined ({type(error).__name__}: {error})."
            line = Line(name, text, Status.NOTE)
        failed |= _failed([line])
        yield line
    devices = check_in_child("torch", "device", IMPORT_SECONDS)
    failed |= _failed(devices)
    yield from devices
    gpus = devices[0].data.get("gpus", 0)
    forms = formats or devices[-1].data.get("formats", ["int8"])[:1]
    trainings = {}
    for form in forms:
        name = "mixed" if form.startswith("{") else form
        trainings[form] = Trial(f"train-{name}", "trial", 0)
    trials = [*trainings.items(), *((forms[0], trial) for trial in TRIALS)]
    for form, trial in trials:
        required = ("vllm", "torch", trainings[form].name)
        reason = _reason_to_skip(trial, [name for name in required if name in failed], quick, gpus)
        if reason:
            lines = [Line(trial.name, reason, Status.SKIPPED, evidence=Evidence.NONE)]
        else:
            print(
                f"{trial.name}: starting an engine in {form}; this may take minutes.",
                file=sys.stderr,
            )
            lines = check_in_child(trial.name, trial.module, TRIAL_SECONDS, form, trial.name)
            lines = [replace(line, evidence=Evidence.TRIED) for line in lines]
        failed |= _failed(lines)
        yield from lines


def _failed(lines: Sequence[Line]) -> set[str]:
    return {line.name for line in lines if line.status is Status.FAILED}


def _reason_to_skip(trial: Trial, failed: Sequence[str], quick: bool, gpus: int) -> str:
    """Say why a trial is left out; empty if it is not. `failed` are lines that it depends on."""
    if failed:
        return f"depends on the line {failed[0]}, which failed"
    if quick:
        return "--quick starts no engine"
    if gpus < trial.least_gpus:
        needed = "a GPU" if trial.least_gpus == 1 else f"{trial.least_gpus} GPUs"
        return f"needs {needed}; the tests simulate it"
    return ""
