"""The `trl-qurl` command: parses arguments, runs one subcommand and reports its errors.

Only the module of the requested subcommand is imported (`parser.COMMANDS`), so `--help` is fast. Errors that users can
cause (a missing file, conflicting settings, a missing package) are printed on one line; `TRL_QURL_DEBUG=1` shows the
traceback instead.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trl_qurl.cli.noise import quiet, shows_everything
from trl_qurl.cli.parser import COMMANDS, build_parser
from trl_qurl.rollout.errors import RolloutError

USER_ERRORS = (ValueError, ImportError, OSError, RolloutError)  # OSError covers FileNotFoundError, ConnectionError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand, and return its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv:
        build_parser().print_help()
        return 0
    quiet()  # before a subcommand's options import torch, which reads its log level only once
    try:
        parser = build_parser(argv)
        args, extra_args = parser.parse_known_args(argv)
        if COMMANDS[args.command].passes_on:
            args.extra_args = extra_args
        elif extra_args:
            args.subparser.error(f"unexpected argument {' '.join(extra_args)}")
        return args.run(args)
    except KeyboardInterrupt:
        if shows_everything():
            raise
        print("trl-qurl: interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT, as shells report it
    except USER_ERRORS as error:
        if shows_everything():
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"trl-qurl: error: {message}", file=sys.stderr)
        return 2
