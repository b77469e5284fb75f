"""Options and output of `trl-qurl demo`. Heavy imports wait until the command runs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from trl_qurl.lab.device import use_one_gpu
from trl_qurl.lab.packages import require

CHAT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl demo`."""
    from trl_qurl.lab.demo.algorithms import ALGORITHMS
    from trl_qurl.quantization.formats import SCHEMES, UNQUANTIZED

    formats = [*SCHEMES, UNQUANTIZED]
    parser.add_argument(
        "--scheme", choices=formats, default="int8", help="rollout format (default: %(default)s)"
    )
    parser.add_argument(
        "--algorithm", choices=ALGORITHMS, default="grpo", help="ppo has a critic instead of groups"
    )
    parser.add_argument(
        "--output-dir", type=Path, default=Path("demo-output"), help="directory for picture and log"
    )
    parser.add_argument(
        "--rollouts", type=int, default=120, help="number of rollouts (default: %(default)s)"
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
    """Train, measure and draw; return exit status 1 if the policy did not learn enough."""
    from trl_qurl.lab.demo.run import ENVIRONMENT, run_demo
    from trl_qurl.quantization.plan import read_formats

    use_one_gpu()
    scheme: Any = read_formats(args.scheme)  # a name: the parser allows no mapping
    if args.rollouts < 1:
        raise ValueError(f"--rollouts is {args.rollouts}: give at least 1.")
    for name, value in ENVIRONMENT.items():  # vLLM reads these once, at import
        os.environ.setdefault(name, value)
    require("The demo", "matplotlib", "rich", extra="demo")
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from trl_qurl.lab.demo import outcome
    from trl_qurl.lab.processes import name_of_command
    from trl_qurl.trainers.run_log import RUN_LOG

    args.output_dir.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()  # bars for loading and saving a small model would hide the demo's
    found = run_demo(scheme, args.output_dir, args.rollouts, args.seed, args.algorithm)
    picture = args.output_dir / "demo.png"
    outcome.draw_outcome(found.run, picture)
    console = Console(highlight=False)
    console.print(*outcome.changed_answers(found), sep="\n")
    for sentence in outcome.sentences(found.run, found.accuracy):
        console.print(sentence)
    print(f"Log: {args.output_dir / RUN_LOG}\nPicture: {picture}")
    print(f"Next, what rounding does to a chat model: {name_of_command()} mismatch {CHAT_MODEL}")
    shortfall = outcome.find_shortfall(found.run, found.accuracy, args.required_share)
    if shortfall is None:
        return 0
    print(f"trl-qurl: the demo failed: {shortfall}", file=sys.stderr)
    return 1
