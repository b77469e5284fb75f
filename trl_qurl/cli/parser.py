"""The subcommands of `trl-qurl`, and their parser.

`COMMANDS` lists the module of each subcommand. A module is imported only when its subcommand is used, so the command
line can start the lab's tools even though the core never imports the lab.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple

from trl_qurl import __version__


class Command(NamedTuple):
    """A subcommand."""

    module: str  # name of a module with `add_arguments(parser)` and `run(args) -> int`
    summary: str  # one line for `trl-qurl --help`
    passes_on: bool = False  # whether unknown arguments are allowed; they arrive as `args.extra_args`
    adds_help: bool = True  # whether argparse answers `--help`; otherwise it is passed on, too


COMMANDS = {
    "grpo": Command("trl_qurl.lab.recipes.grpo", "train on questions with checkable answers (GSM8K)", True, False),
    "ppo": Command("trl_qurl.lab.recipes.ppo", "the same with a critic (the paper's first experiment)", True, False),
    "rloo": Command("trl_qurl.lab.recipes.rloo", "the same with RLOO, which uses one ratio per answer", True, False),
    "quantize": Command("trl_qurl.cli.quantize", "write a quantized checkpoint of a model"),
    "serve": Command("trl_qurl.cli.serve", "start a vLLM server for training; other options are passed to vLLM", True),
    "eval": Command("trl_qurl.lab.evaluation.command", "answer and grade benchmarks, in one or several formats"),
    "bench": Command("trl_qurl.lab.bench.run", "measure whether quantized rollouts pay off on this machine"),
    "mismatch": Command("trl_qurl.lab.mismatch.run", "measure the effect of rounding on a model, before training"),
    "report": Command("trl_qurl.lab.report", "compare runs in a table and a picture"),
    "demo": Command("trl_qurl.lab.demo.command", "train a tiny model on three-digit addition, in minutes on a CPU"),
    "doctor": Command(
        "trl_qurl.lab.doctor.command", "check what works on this machine, for a new machine or a bug report"
    ),
}


def build_parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Build the parser of `trl-qurl`, importing only the module of the subcommand in `argv`, for its options."""
    parser = argparse.ArgumentParser(
        prog="trl-qurl",
        description="Reinforcement learning of language models with quantized rollouts.",
        epilog="`trl-qurl COMMAND --help` lists the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"trl-qurl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    requested = next((argument for argument in argv if not argument.startswith("-")), None)
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            add_help=command.adds_help,
        )
        if name == requested:
            module = import_module(command.module)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run, subparser=subparser)
    return parser


def did_you_mean(words: Iterable[str], names: Sequence[str]) -> str:
    """Return `"; did you mean NAME?"`, or `"."` if no name is similar enough."""
    matches = [name for word in words for name in get_close_matches(word, names, 1)]
    return f"; did you mean {' '.join(matches)}?" if matches else "."
