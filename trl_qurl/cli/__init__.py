"""The `trl-qurl` command: parses arguments, runs one subcommand and reports its errors.

Only the module of the requested subcommand is imported, by its name in `COMMANDS`, so `--help` is
fast, and this command starts the lab's tools even though the core never imports the lab. Errors
that users can cause (a missing file, conflicting settings, a missing package) are printed on one
line; `TRL_QURL_DEBUG=1` shows the traceback instead.
"""

import argparse
import importlib.metadata
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from trl_qurl.cli.noise import quiet, shows_everything
from trl_qurl.rollout.errors import RolloutError

# OSError covers FileNotFoundError and ConnectionError.
USER_ERRORS = (ValueError, ImportError, OSError, RolloutError)


class Command(NamedTuple):
    """A subcommand."""

    module: str  # name of a module with `add_arguments(parser)` and `run(args) -> int`
    summary: str  # one line for `trl-qurl --help`
    passes_on: bool = False  # whether unknown arguments are allowed, as `args.extra_args`
    adds_help: bool = True  # whether argparse answers `--help`; otherwise it is passed on, too


COMMANDS = {
    "grpo": Command(
        "trl_qurl.lab.recipes.questions",
        "train on questions with checkable answers (GSM8K)",
        passes_on=True,
        adds_help=False,
    ),
    "ppo": Command(
        "trl_qurl.lab.recipes.questions",
        "the same with a critic (the paper's first experiment)",
        passes_on=True,
        adds_help=False,
    ),
    "rloo": Command(
        "trl_qurl.lab.recipes.questions",
        "the same with RLOO, which uses one ratio per answer",
        passes_on=True,
        adds_help=False,
    ),
    "quantize": Command("trl_qurl.lab.quantize", "write a quantized checkpoint of a model"),
    "serve": Command(
        "trl_qurl.cli.serve",
        "start a vLLM server for training; other options are passed to vLLM",
        passes_on=True,
    ),
    "eval": Command(
        "trl_qurl.lab.evaluation.command", "answer and grade benchmarks, in one or several formats"
    ),
    "bench": Command(
        "trl_qurl.lab.bench.run", "measure whether quantized rollouts pay off on this machine"
    ),
    "mismatch": Command(
        "trl_qurl.lab.mismatch.run", "measure the effect of rounding on a model, before training"
    ),
    "report": Command("trl_qurl.lab.report", "compare runs in a table and a picture"),
    "demo": Command(
        "trl_qurl.lab.demo.command",
        "train a tiny model on three-digit addition, in minutes on a CPU",
    ),
    "doctor": Command(
        "trl_qurl.lab.doctor.command", "check what works on this machine, also for a bug report"
    ),
}


def build_parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Build the parser of `trl-qurl`.

    It imports only the module of the subcommand in `argv`, for its options.
    """
    parser = argparse.ArgumentParser(
        prog="trl-qurl",
        description="Reinforcement learning of language models with quantized rollouts.",
        epilog="`trl-qurl COMMAND --help` lists the options of a command.",
    )
    version = f"trl-qurl {importlib.metadata.version('trl-qurl')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands"
    )
    requested = next((argument for argument in argv if not argument.startswith("-")), None)
    for name, command in COMMANDS.items():
        description = f"{command.summary[0].upper()}{command.summary[1:]}."
        subparser = commands.add_parser(
            name, help=command.summary, description=description, add_help=command.adds_help
        )
        if name == requested:
            module = import_module(command.module)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run, subparser=subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand, and return its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv:
        build_parser().print_help()
        return 0
    quiet()  # before a subcommand's options import torch, which reads its log level only once
    try:
        args = parse_arguments(argv)
        status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # as of `trl-qurl report RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own flush
        return 128 + signal.SIGPIPE
    except (KeyboardInterrupt, *USER_ERRORS) as error:
        if shows_everything():
            raise
        if isinstance(error, KeyboardInterrupt):
            print("\ntrl-qurl: interrupted", *error.args, sep=": ", file=sys.stderr)
            return 130  # 128 + SIGINT, as shells report it
        words = " ".join([str(error), *getattr(error, "__notes__", ())]).split()
        message = " ".join(words) or type(error).__name__
        print(f"trl-qurl: error: {message}", file=sys.stderr)
        return 2


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse a command line; exit at arguments that the subcommand neither knows nor passes on."""
    args, extra_args = build_parser(argv).parse_known_args(argv)
    args.extra_args = extra_args
    if extra_args and not COMMANDS[args.command].passes_on:
        args.subparser.error(f"unrecognized arguments: {' '.join(extra_args)}")
    return args
