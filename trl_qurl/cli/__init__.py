"""The command `trl-qurl`: parse, call, print.

Everything heavy is imported inside the subcommand that needs it, so that `--help` answers at once. What a user can
cause (a missing file, a setting that does not fit, a part that is not installed) is printed as one line; with
`TRL_QURL_DEBUG=1` the traceback is shown instead.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from trl_qurl.cli.noise import quiet, shows_everything
from trl_qurl.cli.options import LAB_COMMANDS, build_parser
from trl_qurl.rollout.errors import RolloutError

USER_ERRORS = (ValueError, ImportError, OSError, RolloutError)  # OSError covers FileNotFoundError, ConnectionError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status: 0, 1 if a demo fell short of its goal, 2 for a user's error."""
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what could come next: `register-python-argcomplete` did that
        import argcomplete

        argcomplete.autocomplete(parser)
    args, further = parser.parse_known_args(argv)
    if args.command in ("grpo", "ppo", "serve"):
        args.further = further
    elif further:
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    run = {
        "grpo": run_grpo,
        "ppo": run_ppo,
        "quantize": run_quantize,
        "serve": run_serve,
    }
    quiet()
    try:
        if args.command in LAB_COMMANDS:
            return importlib.import_module(LAB_COMMANDS[args.command].module).run(args)
        return run[args.command](args)
    except USER_ERRORS as error:
        if shows_everything():
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"trl-qurl: error: {message}", file=sys.stderr)
        return 2


def run_grpo(args: argparse.Namespace) -> int:
    """`trl-qurl grpo`: whatever follows is for TRL's own argument parser."""
    from trl_qurl.lab.recipes.grpo import parse_arguments, train

    trainer = train(*parse_arguments(args.further))
    trainer.accelerator.print(f"Policy saved to {trainer.args.output_dir}")
    return 0


def run_ppo(args: argparse.Namespace) -> int:
    """`trl-qurl ppo`: whatever follows is for TRL's own argument parser."""
    from trl_qurl.lab.recipes.ppo import parse_arguments, train

    trainer = train(*parse_arguments(args.further))
    trainer.accelerator.print(f"Policy saved to {trainer.args.output_dir}, its critic to critic/ in it")
    return 0


def run_quantize(args: argparse.Namespace) -> int:
    """`trl-qurl quantize`: the checkpoint that vLLM starts from."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_qurl.lab.recipes.arguments import check_model
    from trl_qurl.quantization import write_checkpoint

    check_model(args.model)
    print(f"Loading {args.model}", flush=True)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    print(f"Rounding its weights to {args.scheme.upper()} ({args.quantizer})", flush=True)
    write_checkpoint(
        model,
        tokenizer,
        args.scheme,
        args.output_dir,
        ignore=tuple(args.ignore),
        quantizer=args.quantizer,
        show_progress=True,
    )
    print(f"{args.scheme.upper()} checkpoint written to {args.output_dir}")
    return 0


def run_serve(args: argparse.Namespace) -> int:
    """`trl-qurl serve`: prepare the checkpoint, then become vLLM's own server."""
    from trl_qurl.lab.recipes.arguments import check_model
    from trl_qurl.rollout.engine import launch

    check_model(args.model)
    launch.require_vllm()
    model = launch.resolve_model(args.model)
    if args.scheme != "none":
        model = str(launch.starting_checkpoint(model, args.scheme, args.ignore))
    if warning := launch.exposure_warning(args.host, args.further):
        print(f"trl-qurl: {warning}", file=sys.stderr)
    launch.become_server(launch.server_command(model, args.host, args.port, args.further))
    return 0
