"""Options and output of `trl-qurl mismatch`. Heavy imports wait until the command runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from trl_qurl.cli.options import add_ignore, check_model, json_dictionary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl mismatch`."""
    parser.epilog = "Samples answers from one engine per format and scores them with the full-precision model."
    parser.add_argument("model", metavar="MODEL", help="full-precision model: Hub name or local directory")
    from trl_qurl.quantization.formats import SCHEMES

    parser.add_argument(
        "--schemes",
        metavar="FORMAT[,FORMAT...]",
        help=f"any of {', '.join(SCHEMES)} (default: all that this machine and the model support)",
    )
    parser.add_argument(
        "--questions",
        metavar="SOURCE",
        help="a task of `trl-qurl eval` (gsm8k, a .jsonl file, ...) or a .txt file with one prompt per line "
        "(default: 16 built-in questions of mixed kinds)",
    )
    parser.add_argument("--limit", type=int, default=16, metavar="N", help="first N questions (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=4, help="answers per question (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer, in tokens (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kl", type=float, metavar="NATS", help="choose layers to keep in 16 bits for a KL of at most NATS per token"
    )
    parser.add_argument("--megabytes", type=float, metavar="MB", help="like --kl, for at most MB of extra weights")
    parser.add_argument(
        "--no-smooth", action="store_true", help="measure as with smooth_activations=False (default: INT8 is smoothed)"
    )
    add_ignore(parser)
    parser.add_argument(
        "--engine-kwargs", type=json_dictionary, default={}, metavar="JSON", help="extra arguments for vllm.LLM"
    )
    output = Path("mismatch.json")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=output,
        help="JSON file with all results; the plot is saved next to it as .png (default: %(default)s)",
    )


def check_output(path: Path) -> None:
    """Create the directory of the output file; raise `ValueError` if it is not a .json file."""
    if path.suffix != ".json":
        raise ValueError(f"--output is {path}: give the name of a .json file. Other outputs are named after it.")
    path.parent.mkdir(parents=True, exist_ok=True)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table and the verdict, and return exit status 0 for any verdict."""
    from trl_qurl.lab.packages import require

    require("This command", "matplotlib", "rich", extra="mismatch")
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from trl_qurl.lab.mismatch.engines import Sampling
    from trl_qurl.lab.mismatch.keep import Budget, write_settings
    from trl_qurl.lab.mismatch.picture import draw_mismatch
    from trl_qurl.lab.mismatch.run import measure_mismatch
    from trl_qurl.lab.mismatch.table import build_layer_table, build_table, sentences

    check_model(args.model)
    check_output(args.output)
    disable_progress_bar()  # hides the bar for loading weights
    sampling = Sampling(args.questions, args.limit, args.samples, args.max_tokens, args.seed)
    schemes = args.schemes.split(",") if args.schemes else None
    budget = None
    if args.kl is not None or args.megabytes is not None:
        budget = Budget(args.kl, None if args.megabytes is None else int(1e6 * args.megabytes))
    console = Console()
    report, log_ratios = measure_mismatch(
        args.model,
        sampling,
        schemes,
        args.ignore,
        args.engine_kwargs,
        console.print,
        args.output,
        budget,
        smooths=not args.no_smooth,
    )
    console.print(build_table(report))
    settings = ""
    if report.kept is not None:
        console.print(build_layer_table(report.kept))
        write_settings(report.kept, args.output.with_suffix(".yaml"))
        settings = f"Settings for --config: {args.output.with_suffix('.yaml')}. "
    for line in sentences(report):
        console.print(line)
    image = args.output.with_suffix(".png")
    draw_mismatch(report, log_ratios, image)
    print(f"{settings}Results: {args.output}, {image}")
    return 0
