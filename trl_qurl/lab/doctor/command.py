"""Options of `trl-qurl doctor`, and its checks in order: quick inspections first, then a real trial."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

from trl_qurl.lab.doctor.child import check_in_child
from trl_qurl.lab.doctor.environment import INSPECTIONS
from trl_qurl.lab.doctor.report import Line, Status, as_json, as_text

IMPORT_SECONDS = 120.0  # time limit for importing torch
TRIAL_SECONDS = 600.0  # per format; most of it is for compiling on a slow machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl doctor`."""
    parser.epilog = "docs/troubleshooting.md explains each line. The exit status is 1 if a required check fails."
    parser.add_argument("--quick", action="store_true", help="skip the trial, which starts an engine")
    parser.add_argument("--json", action="store_true", help="print JSON for bug reports: no secrets, no home paths")
    parser.add_argument(
        "--formats",
        nargs="+",
        metavar="FORMAT",
        default=[],
        help="formats to train in; none means 16 bits (default: the first that this machine has kernels for)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the checks and print each line as soon as it is ready."""
    if args.formats:
        with suppress(ImportError, OSError):  # if torch cannot be imported, the report says so
            from trl_qurl.quantization.plan import read_formats

            for name in args.formats:
                read_formats(name)
    lines = []
    for line in examine(args.formats, args.quick):
        lines.append(line)
        if not args.json:
            print(as_text(line), flush=True)
    failures = [line.name for line in lines if line.status is Status.FAILED]
    if args.json:
        print(as_json(lines))
    else:
        print(f"FAILED: {', '.join(failures)}." if failures else "All checks passed.")
    return int(bool(failures))


def examine(formats: Sequence[str], quick: bool) -> Iterator[Line]:
    """Yield the result of each check; standard error announces those that take long."""
    results = []
    for check in INSPECTIONS:
        try:
            line = check()
        except Exception as error:  # the other lines are still useful
            name = check.__name__.removeprefix("check_")
            line = Line(name, f"could not be determined ({type(error).__name__}: {error}).", Status.NOTE)
        results.append(line)
        yield line
    results += (devices := check_in_child("torch", "device", IMPORT_SECONDS))
    yield from devices
    failed = [line.name for line in results if line.status is Status.FAILED and line.name in ("vllm", "torch")]
    for form in formats or devices[-1].data.get("formats", ["int8"])[:1]:
        name = f"train-{form}"
        if failed:
            yield Line(name, f"depends on the line {failed[0]}, which failed", Status.SKIPPED)
        elif quick:
            yield Line(name, "--quick starts no engine", Status.SKIPPED)
        else:
            print(f"Starting an engine in {form}; this may take minutes.", file=sys.stderr)
            yield from check_in_child(name, "trial", TRIAL_SECONDS, form)
