"""Options and output of `trl-qurl report`. Heavy imports wait until the command runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl report`."""
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="output_dir of a run, or its run.jsonl(.gz)")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), help="HTML file to write (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the page and return exit status 0."""
    from trl_qurl.lab.report.page import write_report

    report = write_report(args.runs, args.output)
    for note in report.notes:
        print(f"trl-qurl: note: {note}", file=sys.stderr)
    print(f"Report: {report.page}")
    return 0
