"""What `trl-qurl` takes from the command line: every subcommand with its options, as argparse knows them.

`grpo` and `ppo` have no options here: what follows them is for TRL's own parser, whose options are the fields of the
configurations.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from trl_qurl import __version__


class LabCommand(NamedTuple):
    """A subcommand of the lab, found by the name of its module, which offers `add_arguments` and `run`."""

    module: str
    help: str


LAB_COMMANDS = {
    "eval": LabCommand("trl_qurl.lab.evaluation.command", "answer and grade benchmarks, in 16 and in 8 bits"),
    "bench": LabCommand("trl_qurl.lab.bench.command", "measure whether quantized rollouts pay on this machine"),
    "report": LabCommand("trl_qurl.lab.report.command", "draw the paper's figures from run logs, on one page"),
    "demo": LabCommand("trl_qurl.lab.demo.command", "train a tiny model on addition, in minutes, on a CPU"),
    "env": LabCommand("trl_qurl.lab.environment", "print what an issue should say about this machine, ready to paste"),
}


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

    for name, command in LAB_COMMANDS.items():
        module = importlib.import_module(command.module)
        module.add_arguments(commands.add_parser(name, help=command.help))
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
