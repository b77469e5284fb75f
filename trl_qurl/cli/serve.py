"""`trl-qurl serve`: prepare a quantized checkpoint of a model, then exec vLLM's server on it."""

from __future__ import annotations

import argparse

from trl_qurl.cli.noise import shows_everything
from trl_qurl.cli.options import add_ignore, check_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl serve`."""
    from trl_qurl.quantization.formats import SCHEMES, UNQUANTIZED

    parser.epilog = (
        "Every request needs an API key; trainers of the same user find it automatically. Nothing is encrypted."
    )
    parser.add_argument("model", metavar="MODEL", help="full-precision model: name on the Hub, or a local directory")
    parser.add_argument(
        "--scheme",
        choices=[*SCHEMES, UNQUANTIZED],
        default="int8",
        help="rollout format; none means 16 bits (default: %(default)s)",
    )
    add_ignore(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="API key for every request (default: $VLLM_API_KEY, or a random one for trainers on this machine)",
    )


def run(args: argparse.Namespace) -> int:
    """Prepare the checkpoint, then exec the server."""
    if args.extra_args and not args.extra_args[0].startswith("-"):  # vLLM would reject it only after quantization
        raise ValueError(
            f"Unexpected argument {args.extra_args[0]}: pass one MODEL, and one pattern after each --ignore (repeat "
            "the option for more)."
        )
    check_model(args.model)
    from trl_qurl.quantization.formats import parse_scheme
    from trl_qurl.rollout.engine import launch

    launch.require_vllm()
    launch.check_load_balancing(args.extra_args)
    launch.check_cache(args.extra_args)
    launch.check_speculation(args.extra_args)
    scheme = parse_scheme(args.scheme)
    environment = launch.server_environment(args.host, args.port, args.api_key, scheme)
    model = launch.resolve_model(args.model)
    if scheme is not None:
        model = str(
            launch.starting_checkpoint(
                model, scheme, args.ignore, "trust_remote_code" in launch.values_of(args.extra_args)
            )
        )
    command = launch.server_command(model, args.host, args.port, args.extra_args, show_warnings=shows_everything())
    return launch.run_server(command, environment)
