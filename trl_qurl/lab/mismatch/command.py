"""`trl-qurl mismatch`: its options, and what it prints. Nothing heavy is imported before the command runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from trl_qurl.cli.options import add_ignore, check_model, json_dictionary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl mismatch`."""
    parser.epilog = "An engine in each format answers, and the model in full precision scores its answers."
    parser.add_argument("model", metavar="MODEL", help="full-precision model: name on the Hub, or a local directory")
    from trl_qurl.quantization.formats import SCHEMES

    parser.add_argument(
        "--schemes",
        metavar="FORMAT[,FORMAT...]",
        help=f"of {', '.join(SCHEMES)} (default: those that fit this machine and the model)",
    )
    parser.add_argument(
        "--questions",
        metavar="SOURCE",
        help="a task of `trl-qurl eval` (gsm8k, a .jsonl file, ...) or a .txt file with one prompt per line "
        "(default: 16 of all kinds)",
    )
    parser.add_argument("--limit", type=int, default=16, metavar="N", help="first questions (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=4, help="answers to each (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kl", type=float, metavar="NATS", help="find layers to keep in 16 bits for a KL of at most NATS per token"
    )
    parser.add_argument("--megabytes", type=float, metavar="MB", help="the same for at most MB more of weights")
    parser.add_argument(
        "--no-smooth", action="store_true", help="as in a run with smooth_activations=False (INT8 is smoothed else)"
    )
    add_ignore(parser)
    parser.add_argument(
        "--engine-kwargs", type=json_dictionary, default={}, metavar="JSON", help="further arguments of vllm.LLM"
    )
    output = Path("mismatch.json")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=output,
        help="for all figures, with a .png beside it (default: %(default)s)",
    )


def check_output(path: Path) -> None:
    """Make the directory of the JSON file; `ValueError` for another kind of file, beside which others are written."""
    if path.suffix != ".json":
        raise ValueError(f"--output is {path}: give the name of a .json file; the others get its name, too.")
    path.parent.mkdir(parents=True, exist_ok=True)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table and the verdict; the exit status is 0 whatever the verdict is."""
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
    disable_progress_bar()  # of weights that are loaded
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
    picture = args.output.with_suffix(".png")
    draw_mismatch(report, log_ratios, picture)
    print(f"{settings}Figures: {args.output}, {picture}")
    return 0
