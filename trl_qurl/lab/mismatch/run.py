"""`trl-qurl mismatch`: sample from one engine per format, score the answers, and advise.

Heavy imports wait until the command runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trl_qurl.cli.options import check_model
from trl_qurl.lab.comparison import (
    BASELINE,
    add_options,
    candidates,
    check_output,
    fitting_formats,
    write_json,
)
from trl_qurl.lab.mismatch.prompts import Sampling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl mismatch`."""
    parser.epilog = (
        "Samples answers from one engine per format and scores them with the full-precision model."
    )
    parser.add_argument(
        "model", metavar="MODEL", help="full-precision model: Hub name or local directory"
    )
    parser.add_argument(
        "--questions",
        metavar="SOURCE",
        help=(
            "a task of `trl-qurl eval` (gsm8k, a .jsonl file, ...) or a .txt file with one prompt "
            "per line (default: 16 built-in questions of mixed kinds)"
        ),
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=16,
        metavar="N",
        help="first N questions (default: %(default)s)",
    )
    parser.add_argument(
        "--samples", type=int, default=4, help="answers per question (default: %(default)s)"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=128,
        help="longest answer, in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--kl",
        type=float,
        metavar="NATS",
        help="choose finer formats for layers of int8 (--scheme): at most this KL",
    )
    parser.add_argument(
        "--no-smooth",
        action="store_true",
        help="measure as with smooth_activations=False (default: INT8 is smoothed)",
    )
    add_options(parser, Path("mismatch.json"))


def run(args: argparse.Namespace) -> int:
    """Measure, print the table and the verdict, and return exit status 0 for any verdict."""
    check_model(args.model)
    check_output(args.output)
    if args.kl is not None and args.scheme is None:
        args.scheme = ["int8"]
    schemes = candidates(args.scheme)
    if args.kl is not None:
        if [*schemes.values()] != args.scheme[:1]:
            names = ", ".join(args.scheme)
            raise ValueError(
                f"--kl requires exactly one format, but got {names}: choose one with --scheme."
            )
        if not args.kl > 0:
            raise ValueError(f"--kl is {args.kl:g}: give a positive number of nats per token.")
    sampling = Sampling(args.questions, args.limit, args.samples, args.max_tokens)

    import yaml
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from trl_qurl.lab.mismatch.engines import Engines
    from trl_qurl.lab.mismatch.finer import choose_finer
    from trl_qurl.lab.mismatch.report import Report
    from trl_qurl.lab.mismatch.table import build_layer_table, build_table, sentences

    disable_progress_bar()  # hides the bar for loading weights
    console = Console()
    engines = Engines(
        args.model, sampling, args.ignore, args.engine_kwargs, console.print, not args.no_smooth
    )
    schemes = fitting_formats(engines.policy, args.scheme, args.ignore, console.print)
    report = Report(args.model, sampling, tuple(args.ignore))
    for name, formats in {BASELINE: BASELINE, **schemes}.items():
        report.formats[name] = engines.measure(formats)
        write_json(report, args.output)
    if args.kl is not None:
        report.choice, mismatch = choose_finer(engines, next(iter(schemes)), report, args.kl)
        report.formats[report.choice.name] = mismatch
        write_json(report, args.output)
    console.print(build_table(report))
    if report.choice is not None:
        console.print(build_layer_table(report.choice))
        values = {"rollout_quantization": report.choice.formats, "quantization_ignore": args.ignore}
        text = yaml.safe_dump(values, sort_keys=False)
        path = args.output.with_suffix(".yaml")
        path.write_text(text, encoding="utf-8")
        print(f"{path}, for --config:\n\n{text}")
    for line in sentences(report):
        console.print(line)
    print(f"Results: {args.output}")
    return 0
