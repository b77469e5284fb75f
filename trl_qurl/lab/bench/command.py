"""Options and output of `trl-qurl bench`. Heavy imports wait until the command runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from trl_qurl.cli.options import add_ignore, check_model, json_dictionary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl bench`."""
    parser.epilog = "Uses random weights: the cost of a step does not depend on their values."
    parser.add_argument("model", metavar="MODEL", help="Hub name or directory with a config.json")
    parser.add_argument("--prompt-len", type=int, default=256, help="tokens per prompt (default: %(default)s)")
    parser.add_argument("--completion-len", type=int, default=512, help="tokens per completion (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="completions per rollout (default: %(default)s)")
    parser.add_argument("--generations", type=int, default=8, help="completions per prompt (default: %(default)s)")
    parser.add_argument("--train-batch", type=int, default=8, help="completions per pass (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=4, help="optimizer steps per rollout (default: %(default)s)")
    parser.add_argument(
        "--no-gradient-checkpointing", action="store_true", help="train without gradient checkpointing"
    )
    parser.add_argument("--lora-rank", type=int, default=0, help="train an adapter of this rank on all linear layers")
    parser.add_argument(
        "--weight-sync",
        choices=("auto", "adapter"),
        default="auto",
        help="'adapter' also measures each format with an unmerged adapter in the engine (default: merged only)",
    )
    from trl_qurl.quantization.formats import SCHEMES

    parser.add_argument(
        "--schemes",
        metavar="FORMAT[,FORMAT...]",
        help=f"any of {', '.join(SCHEMES)} (default: all that this machine and the model support)",
    )
    parser.add_argument("--quick", action="store_true", help="measure for only a few seconds and extrapolate more")
    add_ignore(parser)
    parser.add_argument(
        "--engine-kwargs", type=json_dictionary, default={}, metavar="JSON", help="extra arguments for vllm.LLM"
    )
    output = Path("bench.json")
    parser.add_argument("-o", "--output", type=Path, default=output, help="JSON file (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table and the advice, and return exit status 0 for any advice."""
    from rich.console import Console

    from trl_qurl.lab.bench.run import bench
    from trl_qurl.lab.bench.table import build_table, sentences
    from trl_qurl.lab.bench.workload import Workload

    workload = Workload(
        args.prompt_len,
        args.completion_len,
        args.batch,
        args.generations,
        args.train_batch,
        args.updates,
        not args.no_gradient_checkpointing,
        args.lora_rank,
    )
    check_model(args.model)
    schemes = args.schemes.split(",") if args.schemes else None
    console = Console()
    options = (args.quick, args.ignore, args.engine_kwargs)
    result = bench(args.model, workload, schemes, *options, console.print, args.output, args.weight_sync)
    console.print(build_table(result))
    for line in sentences(result):
        console.print(line)
    print(f"Results: {args.output}")
    return 0
