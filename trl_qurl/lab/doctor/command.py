"""Options of `trl-qurl doctor`, and its checks in order: quick
inspections first, then real trials.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from trl_qurl.lab.comparison import read_schemes, split_schemes
from trl_qurl.lab.doctor.child import check_in_child
from trl_qurl.lab.doctor.environment import INSPECTIONS
from trl_qurl.lab.doctor.report import Evidence, Line, Status, as_json, as_text

TRIALS = (
    ("server", "server", 0),
    ("graphs", "fresh", 1),
    ("sleep", "fresh", 1),
    ("nccl", "server", 2),
)
"""Trials in the first format: name, module, lowest number of GPUs. Training is tried in each
format.
"""

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
    else:
        print(f"FAILED: {', '.join(failures)}." if failures else "No check failed.")
    return int(bool(failures))


def examine(formats: Sequence[str], quick: bool) -> Iterator[Line]:
    """Yield the result of each check; standard error announces those that take long."""
    results = []
    for check in INSPECTIONS:
        try:
            line = check()
        except Exception as error:  # the other lines are still useful
            name = check.__name__.removeprefix("check_")
            line = Line(
                name, f"could not be determined ({type(error).__name__}: {error}).", Status.NOTE
            )
        results.append(line)
        yield line
    results += (devices := check_in_child("torch", "device", IMPORT_SECONDS))
    yield from devices
    forms, gpus = (
        formats or devices[-1].data.get("formats", ["int8"])[:1],
        devices[0].data.get("gpus", 0),
    )
    names = {form: f"train-{'mixed' if form.startswith('{') else form}" for form in forms}
    trials = [(form, name, "trial", 0) for form, name in names.items()] + [
        (forms[0], *trial) for trial in TRIALS
    ]
    for form, name, module, least_gpus in trials:
        required = ("vllm", "torch", names[form])
        failed = [
            line.name for line in results if line.status is Status.FAILED and line.name in required
        ]
        reason = ""
        if failed:
            reason = f"depends on the line {failed[0]}, which failed"
        elif quick:
            reason = "--quick starts no engine"
        elif gpus < least_gpus:
            reason = (
                f"needs {'a GPU' if least_gpus == 1 else f'{least_gpus} GPUs'}; the tests simulate "
                "it"
            )
        if reason:
            lines = [Line(name, reason, Status.SKIPPED, evidence=Evidence.NONE)]
        else:
            print(f"{name}: starting an engine in {form}; this may take minutes.", file=sys.stderr)
            lines = [
                replace(line, evidence=Evidence.TRIED)
                for line in check_in_child(name, module, TRIAL_SECONDS, form, name)
            ]
        results += lines
        yield from lines
