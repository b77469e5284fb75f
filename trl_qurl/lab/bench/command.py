"""`trl-qurl bench`: its options, and what it prints. Nothing heavy is imported before the command runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from trl_qurl.cli.options import add_ignore, check_model, json_dictionary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl bench`."""
    parser.epilog = "No weights are loaded: the cost of a step does not depend on their values."
    parser.add_argument("model", metavar="MODEL", help="name on the Hub, or a directory with a config.json")
    parser.add_argument("--prompt-len", type=int, default=256, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument(
        "--completion-len", type=int, default=512, help="tokens of a completion (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=64, help="completions of a rollout (default: %(default)s)")
    parser.add_argument("--generations", type=int, default=8, help="completions of a prompt (default: %(default)s)")
    parser.add_argument("--train-batch", type=int, default=8, help="completions in a pass (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=4, help="optimizer steps per rollout (default: %(default)s)")
    parser.add_argument("--no-gradient-checkpointing", action="store_true", help="train without it")
    parser.add_argument("--lora-rank", type=int, default=0, help="train an adapter on all linear layers")
    parser.add_argument(
        "--weight-sync",
        choices=("auto", "adapter"),
        default="auto",
        help="'adapter': measure each format a second time, with the adapter beside its weights (default: merged)",
    )
    from trl_qurl.quantization.formats import SCHEMES

    parser.add_argument(
        "--schemes",
        metavar="FORMAT[,FORMAT...]",
        help=f"of {', '.join(SCHEMES)} (default: those that fit this machine and the model)",
    )
    parser.add_argument("--quick", action="store_true", help="measure for a few seconds and extrapolate more")
    add_ignore(parser)
    parser.add_argument(
        "--engine-kwargs", type=json_dictionary, default={}, metavar="JSON", help="further arguments of vllm.LLM"
    )
    output = Path("bench.json")
    parser.add_argument("-o", "--output", type=Path, default=output, help="for all figures (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table and the advice; the exit status is 0 whatever the advice is."""
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
    given = (args.quick, args.ignore, args.engine_kwargs)
    result = bench(args.model, workload, schemes, *given, console.print, args.output, args.weight_sync)
    console.print(build_table(result))
    for line in sentences(result):
        console.print(line)
    print(f"Figures: {args.output}")
    return 0
