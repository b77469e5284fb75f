"""Options and output of `trl-qurl demo`. Heavy imports wait until the command runs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from trl_qurl.cli.options import check_model
from trl_qurl.lab.packages import require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl demo`."""
    from trl_qurl.lab.demo.algorithms import ALGORITHMS
    from trl_qurl.quantization.formats import SCHEMES, UNQUANTIZED

    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="Hub name or directory of a chat model to train on one-digit arithmetic "
        "(default: train a tiny model from scratch on three-digit addition)",
    )
    formats = [*SCHEMES, UNQUANTIZED]
    parser.add_argument(
        "--scheme", choices=formats, default="int8", help="rollout format (default: %(default)s)"
    )
    parser.add_argument(
        "--algorithm", choices=ALGORITHMS, default="grpo", help="ppo has a critic instead of groups"
    )
    parser.add_argument(
        "--output-dir", type=Path, default=Path("demo-output"), help="directory for plot and log"
    )
    parser.add_argument(
        "--rollouts", type=int, help="number of rollouts (default: 120; 20 with --model)"
    )
    parser.add_argument(
        "--required-share",
        type=float,
        default=0.4,
        help="fail if fewer of the errors are corrected",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of data, weights and sampling (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Train, measure and plot; return exit status 1 if the policy did not learn enough."""
    from trl_qurl.lab.demo.run import ENVIRONMENT, run_demo
    from trl_qurl.quantization.plan import read_formats

    scheme: Any = read_formats(args.scheme)  # a name: the parser allows no mapping
    rollouts = args.rollouts
    if rollouts is None:
        rollouts = 120 if args.model is None else 20
    if rollouts < 1:
        raise ValueError(f"--rollouts is {rollouts}: give at least 1.")
    if args.model is not None:
        if args.algorithm != "grpo":
            raise ValueError(
                f"--algorithm {args.algorithm} does not work with --model: use --algorithm grpo."
            )
        check_model(args.model)
    for name, value in ENVIRONMENT.items():  # vLLM reads these once, at import
        os.environ.setdefault(name, value)
    require("The demo", "matplotlib", "rich", extra="demo")
    from transformers.utils.logging import disable_progress_bar

    from trl_qurl.lab.report import draw_report, label_runs
    from trl_qurl.lab.runs import read_run
    from trl_qurl.trainers.run_log import RUN_LOG

    args.output_dir.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()  # bars for loading and saving a small model would hide the demo's
    if args.model is not None:
        from trl_qurl.lab.demo.chat import run_chat_demo

        shortfall = run_chat_demo(args.model, scheme, args.output_dir, rollouts, args.seed)
    else:
        shortfall = run_demo(
            scheme, args.output_dir, rollouts, args.required_share, args.seed, args.algorithm
        )
    figure = args.output_dir / "demo.png"
    draw_report(label_runs([read_run(args.output_dir)]), figure)
    print(f"Log: {args.output_dir / RUN_LOG}\nFigure: {figure}")
    following = "demo --model HuggingFaceTB/SmolLM2-135M-Instruct"
    if args.model:
        following = f"grpo --model {args.model} --dataset FILE  # your questions"
    print(f"Next: trl-qurl {following}")
    if shortfall is None:
        return 0
    print(f"trl-qurl: the demo failed: {shortfall}", file=sys.stderr)
    return 1
