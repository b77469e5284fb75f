"""Options and output of `trl-qurl eval`. Heavy imports wait until the command runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from trl_qurl.cli.options import add_ignore, check_model, json_dictionary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl eval`."""
    parser.epilog = "To resume, run the same command again: it generates only the missing answers."
    parser.add_argument("model", metavar="MODEL", help="Hub name or local directory")
    parser.add_argument(
        "--tasks",
        required=True,
        metavar="TASK[,TASK...]",
        help="any of gsm8k, math500, aime24, amc23, minerva, olympiad; local .jsonl(.gz) files; "
        "owner/set[:config:split]; name=source",
    )
    from trl_qurl.quantization.formats import SCHEMES, UNQUANTIZED

    parser.add_argument(
        "--schemes",
        default=UNQUANTIZED,
        metavar="FORMAT[,FORMAT...]",
        help=f"number formats for the same weights: {', '.join([UNQUANTIZED, *SCHEMES])} (default: %(default)s)",
    )
    parser.add_argument("--samples", type=int, default=0, metavar="K", help="sampled answers per question")
    parser.add_argument("--no-greedy", action="store_true", help="skip the greedy answer to each question")
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature (the paper: 1.0 or 0.6)")
    parser.add_argument("--top-p", type=float, default=0.7, help="top-p for sampling (default: the paper's 0.7)")
    parser.add_argument("--max-tokens", type=int, default=2048, help="longest completion (default: %(default)s)")
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N questions of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, help="where to save answers and results (default: eval-MODEL)")
    add_ignore(parser)
    parser.add_argument(
        "--engine-kwargs", type=json_dictionary, default={}, metavar="JSON", help="extra arguments for vllm.LLM"
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate the model, print the table, and return exit status 0."""
    from trl_qurl.lab.evaluation.job import Sampling
    from trl_qurl.lab.evaluation.run import RESULTS_NAME, evaluate

    check_model(args.model)
    output_dir = args.output_dir or Path(f"eval-{Path(args.model).name}")
    sampling = Sampling(args.samples, not args.no_greedy, args.temperature, args.top_p, args.max_tokens, args.seed)
    results = evaluate(
        args.model,
        args.tasks.split(","),
        output_dir,
        sampling,
        args.schemes.split(","),
        args.limit,
        args.ignore,
        args.engine_kwargs,
    )
    from rich.console import Console

    from trl_qurl.lab.evaluation.results import build_table

    Console().print(build_table(results, args.model))
    print(f"Results: {output_dir / RESULTS_NAME}")
    return 0
