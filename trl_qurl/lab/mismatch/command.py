"""Options and output of `trl-qurl mismatch`. Heavy imports wait until the command runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from trl_qurl.cli.options import check_model
from trl_qurl.lab.comparison import add_options, check_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl mismatch`."""
    parser.epilog = "Samples answers from one engine per format and scores them with the full-precision model."
    parser.add_argument("model", metavar="MODEL", help="full-precision model: Hub name or local directory")
    parser.add_argument(
        "--questions",
        metavar="SOURCE",
        help="a task of `trl-qurl eval` (gsm8k, a .jsonl file, ...) or a .txt file with one prompt per line "
        "(default: 16 built-in questions of mixed kinds)",
    )
    parser.add_argument("--limit", type=int, default=16, metavar="N", help="first N questions (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=4, help="answers per question (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer, in tokens (default: %(default)s)")
    parser.add_argument(
        "--kl", type=float, metavar="NATS", help="choose layers to keep in 16 bits for a KL of at most NATS per token"
    )
    parser.add_argument(
        "--no-smooth", action="store_true", help="measure as with smooth_activations=False (default: INT8 is smoothed)"
    )
    add_options(parser, Path("mismatch.json"))


def run(args: argparse.Namespace) -> int:
    """Measure, print the table and the verdict, and return exit status 0 for any verdict."""
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from trl_qurl.lab.mismatch.engines import Sampling
    from trl_qurl.lab.mismatch.keep import write_settings
    from trl_qurl.lab.mismatch.run import measure_mismatch
    from trl_qurl.lab.mismatch.table import build_layer_table, build_table, sentences

    check_model(args.model)
    check_output(args.output)
    disable_progress_bar()  # hides the bar for loading weights
    sampling = Sampling(args.questions, args.limit, args.samples, args.max_tokens)
    console = Console()
    report = measure_mismatch(
        args.model,
        sampling,
        args.schemes,
        args.ignore,
        args.engine_kwargs,
        console.print,
        args.output,
        args.kl,
        smooths=not args.no_smooth,
    )
    console.print(build_table(report))
    settings = ""
    if report.kept is not None:
        console.print(build_layer_table(report.kept))
        path = args.output.with_suffix(".yaml")
        write_settings(report.kept, path)
        settings = f"Settings for --config: {path}. "
    for line in sentences(report):
        console.print(line)
    print(f"{settings}Results: {args.output}")
    return 0
