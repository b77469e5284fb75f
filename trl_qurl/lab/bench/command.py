"""Options and output of `trl-qurl bench`. Heavy imports wait until the command runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from trl_qurl.cli.options import check_model
from trl_qurl.lab.bench.workload import Workload
from trl_qurl.lab.comparison import add_options, check_output

OPTIONS = {
    "prompt_len": "tokens per prompt",
    "completion_len": "tokens per completion",
    "batch": "completions per rollout",
    "generations": "completions per prompt",
    "train_batch": "completions per pass",
    "updates": "optimizer steps per rollout",
    "lora_rank": "train an adapter of this rank on all linear layers, 0 for none",
}
"""Meaning of each option that is a field of `Workload`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl bench`."""
    parser.epilog = "Uses random weights: the cost of a step does not depend on their values."
    parser.add_argument("model", metavar="MODEL", help="Hub name or directory with a config.json")
    for name, meaning in OPTIONS.items():
        help = f"{meaning} (default: %(default)s)"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Workload, name), help=help)
    add_options(parser, Path("bench.json"))


def run(args: argparse.Namespace) -> int:
    """Measure, print the table and the advice, and return exit status 0 for any advice."""
    from rich.console import Console

    from trl_qurl.lab.bench.run import bench
    from trl_qurl.lab.bench.table import build_table, sentences

    workload = Workload(**{name: getattr(args, name) for name in OPTIONS})
    check_model(args.model)
    check_output(args.output)
    console = Console()
    result = bench(args.model, workload, args.schemes, args.ignore, args.engine_kwargs, console.print, args.output)
    console.print(build_table(result))
    for line in sentences(result):
        console.print(line)
    print(f"Results: {args.output}")
    return 0
