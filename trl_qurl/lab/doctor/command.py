"""Options and output of `trl-qurl doctor`. Only the checks' processes import torch."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl doctor`."""
    parser.epilog = "docs/troubleshooting.md explains each line. The exit status is 1 if a required check fails."
    parser.add_argument("--quick", action="store_true", help="skip all checks that start an engine")
    parser.add_argument("--json", action="store_true", help="print JSON for bug reports: no secrets, no home paths")
    parser.add_argument(
        "--formats",
        nargs="+",
        metavar="FORMAT",
        default=[],
        help="formats to test; none means 16 bits (default: all with kernels on this machine)",
    )
    parser.add_argument("--only", nargs="+", metavar="LINE", default=[], help="report only the lines with these names")
    parser.add_argument("--port", type=int, help="also check that this port is free for a server")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=180.0,
        metavar="SECONDS",
        help="time limit per engine (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the checks and print each line as soon as it is ready."""
    from trl_qurl.lab.doctor.examination import examine
    from trl_qurl.lab.doctor.lines import Line, Status
    from trl_qurl.lab.doctor.report import as_json, as_text, skipped_as_text, summary

    check_names(args.only, args.formats)
    started = time.monotonic()

    def report(line: Line) -> None:
        clear()
        if line.status is not Status.SKIPPED and not args.json:
            print(as_text(line), flush=True)

    def clear() -> None:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def busy(names: Sequence[str]) -> None:
        if sys.stderr.isatty():
            print(f"\r...     {', '.join(names)}", end="", file=sys.stderr, flush=True)

    lines = examine(report, busy, args.quick, args.formats, args.only, args.port, args.time_limit)
    clear()
    seconds = time.monotonic() - started
    if args.json:
        print(as_json(lines, seconds))
    else:
        print("\n".join([*skipped_as_text(lines), summary(lines, seconds)]))
    return int(any(line.status is Status.FAILED for line in lines))


def check_names(only: Sequence[str], formats: Sequence[str]) -> None:
    """Raise `ValueError` for an unknown line or format."""
    from trl_qurl.cli.parser import did_you_mean
    from trl_qurl.lab.doctor.lines import LINES, is_known

    for name in only:
        if not is_known(name):
            names = ", ".join(LINES)
            raise ValueError(f"Unknown line {name!r}{did_you_mean([name], list(LINES))} Choose from {names}.")
    if formats:
        from trl_qurl.quantization.formats import parse_scheme

        for name in formats:
            parse_scheme(name)
