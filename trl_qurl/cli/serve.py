"""`trl-qurl serve`: prepare the quantized checkpoint of a model, then exec vLLM's own server on it."""

from __future__ import annotations

import argparse

from trl_qurl.cli.noise import shows_everything
from trl_qurl.cli.options import add_ignore, check_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl serve`."""
    from trl_qurl.quantization.formats import SCHEMES, UNQUANTIZED

    parser.epilog = (
        "Every request needs a key, which trainers of the same user find by themselves. Nothing is encrypted."
    )
    parser.add_argument("model", metavar="MODEL", help="full-precision model: name on the Hub, or a local directory")
    parser.add_argument(
        "--scheme",
        choices=[*SCHEMES, UNQUANTIZED],
        default="int8",
        help="format of the rollouts; none: 16 bits (default: %(default)s)",
    )
    add_ignore(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="key that every request needs (default: $VLLM_API_KEY, or a random one for trainers on this machine)",
    )


def run(args: argparse.Namespace) -> int:
    """Prepare the checkpoint, then exec the server."""
    if args.further and not args.further[0].startswith("-"):  # vLLM would refuse it, after the model was quantized
        raise ValueError(
            f"Unexpected argument {args.further[0]}: give one MODEL, and one pattern after each --ignore (repeat the "
            "option for more)."
        )
    check_model(args.model)
    from trl_qurl.quantization.formats import parse_scheme
    from trl_qurl.rollout.engine import launch

    launch.require_vllm()
    launch.check_load_balancing(args.further)
    launch.check_cache(args.further)
    launch.check_speculation(args.further)
    scheme = parse_scheme(args.scheme)
    environment = launch.server_environment(args.host, args.port, args.api_key, scheme)
    model = launch.resolve_model(args.model)
    if scheme is not None:
        model = str(
            launch.starting_checkpoint(
                model, scheme, args.ignore, "trust_remote_code" in launch.values_of(args.further)
            )
        )
    command = launch.server_command(model, args.host, args.port, args.further, show_warnings=shows_everything())
    return launch.run_server(command, environment)
