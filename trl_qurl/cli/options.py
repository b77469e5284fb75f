"""What `trl-qurl` takes from the command line: every subcommand with its options, as argparse knows them.

`grpo` and `ppo` have no options here: what follows them is for TRL's own parser, whose options are the fields of the
configurations.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from trl_qurl import __version__


def build_parser() -> argparse.ArgumentParser:
    """All subcommands; `command` is the name of the one that was given."""
    parser = argparse.ArgumentParser(prog="trl-qurl", description="Reinforcement learning with quantized rollouts.")
    parser.add_argument("--version", action="version", version=f"trl-qurl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    commands.add_parser("grpo", add_help=False, help="train on questions with checkable answers (GSM8K)")
    commands.add_parser("ppo", add_help=False, help="the same with a critic, as in the paper's first experiment")

    quantize = commands.add_parser("quantize", help="write the 8-bit checkpoint of a model")
    quantize.add_argument("model", metavar="MODEL", help="name on the Hub, or a local directory")
    quantize.add_argument("output_dir", metavar="OUT", type=Path, help="directory of the checkpoint")
    quantize.add_argument("--scheme", choices=["int8", "fp8"], required=True)
    quantize.add_argument("--ignore", nargs="+", default=["lm_head"], metavar="PATTERN", help="modules to leave alone")
    quantize.add_argument("--quantizer", choices=["llmcompressor", "streaming"], default="llmcompressor")

    serve = commands.add_parser(
        "serve",
        help="start a vLLM server for training; options it does not know go to vLLM",
        epilog="The server loads weights from whoever reaches it, key or not: keep it on a private interface.",
    )
    serve.add_argument("model", metavar="MODEL", help="full-precision model: name on the Hub, or a local directory")
    serve.add_argument("--scheme", choices=["int8", "fp8", "none"], default="int8", help="none: BF16 rollouts")
    serve.add_argument("--ignore", nargs="+", default=["lm_head"], metavar="PATTERN", help="modules to leave alone")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000)

    evaluation = commands.add_parser(
        "eval",
        help="answer and grade benchmarks, in full precision and in 8 bits",
        epilog="Started again with the same arguments, it makes only what is missing.",
    )
    evaluation.add_argument("model", metavar="MODEL", help="name on the Hub, or a local directory")
    evaluation.add_argument(
        "--tasks",
        required=True,
        metavar="TASK[,TASK...]",
        help="of gsm8k, math500, aime24, amc23, minerva, olympiad; local .jsonl(.gz) files; owner/set[:config:split]; "
        "name=source",
    )
    evaluation.add_argument("--schemes", default="none", metavar="none,int8,fp8", help="formats of the same weights")
    evaluation.add_argument("--samples", type=int, default=0, metavar="K", help="sampled answers to each question")
    evaluation.add_argument("--no-greedy", action="store_true", help="leave out the greedy answer to each question")
    evaluation.add_argument("--temperature", type=float, default=1.0, help="of the samples (the paper: 1.0, or 0.6)")
    evaluation.add_argument("--top-p", type=float, default=0.7, help="of the samples (default: the paper's 0.7)")
    evaluation.add_argument("--max-tokens", type=int, default=2048, help="longest completion")
    evaluation.add_argument("--limit", type=int, help="only the first so many questions of each task")
    evaluation.add_argument("--seed", type=int, default=0)
    evaluation.add_argument("--output-dir", type=Path, help="for answers and results (default: eval-MODEL)")
    evaluation.add_argument("--ignore", nargs="+", default=["lm_head"], metavar="PATTERN", help="modules left alone")
    evaluation.add_argument(
        "--engine-kwargs", type=json_dictionary, default={}, metavar="JSON", help="further arguments of vllm.LLM"
    )

    bench = commands.add_parser(
        "bench",
        help="measure whether quantized rollouts pay on this machine",
        epilog="No weights are loaded: what a step costs does not depend on what they are.",
    )
    bench.add_argument("model", metavar="MODEL", help="name on the Hub, or a directory with a config.json")
    bench.add_argument("--prompt-len", type=int, default=256, help="tokens of a prompt (default: %(default)s)")
    bench.add_argument("--completion-len", type=int, default=512, help="tokens of a completion (default: %(default)s)")
    bench.add_argument("--batch", type=int, default=64, help="completions of a rollout (default: %(default)s)")
    bench.add_argument("--generations", type=int, default=8, help="completions of a prompt (default: %(default)s)")
    bench.add_argument("--train-batch", type=int, default=8, help="completions in a pass (default: %(default)s)")
    bench.add_argument("--updates", type=int, default=4, help="optimizer steps per rollout (default: %(default)s)")
    bench.add_argument("--no-gradient-checkpointing", action="store_true", help="train without it")
    bench.add_argument("--schemes", metavar="int8,fp8", help="formats (default: those this machine has kernels for)")
    bench.add_argument("--quick", action="store_true", help="spend seconds on each measurement, and estimate more")
    bench.add_argument("--ignore", nargs="+", default=["lm_head"], metavar="PATTERN", help="modules left alone")
    bench.add_argument(
        "--engine-kwargs", type=json_dictionary, default={}, metavar="JSON", help="further arguments of vllm.LLM"
    )
    bench.add_argument("-o", "--output", type=Path, help="JSON file for all figures")

    report = commands.add_parser("report", help="draw the paper's figures from the logs of runs, on one page")
    report.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="output_dir of a run, or its run.jsonl(.gz)")
    report.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), help="the page (default: %(default)s)"
    )

    demo = commands.add_parser("demo", help="train a tiny model on three-digit addition, in minutes, on CPU")
    demo.add_argument("--scheme", choices=["int8", "fp8", "none"], default="int8", help="none: BF16 rollouts")
    demo.add_argument("--algorithm", choices=["grpo", "ppo"], default="grpo", help="ppo: a critic, and no groups")
    demo.add_argument("--compare", choices=["int8", "fp8", "none"], help="first train with these rollouts as well")
    demo.add_argument("--output-dir", type=Path, default=Path("demo-output"), help="for the picture and the log")
    demo.add_argument("--rollouts", type=int, default=120, help="each makes 256 completions and four updates")
    demo.add_argument("--required-rise", type=float, default=0.25, help="of the expected accuracy, or the demo fails")
    demo.add_argument("--seed", type=int, default=0)

    commands.add_parser("env", help="print what an issue should say about this machine, ready to paste")
    return parser


def json_dictionary(text: str) -> dict[str, Any]:
    """An argument that is a JSON dictionary; another one is a mistake that argparse reports."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON dictionary such as '{{\"enforce_eager\": true}}'")
    return value
