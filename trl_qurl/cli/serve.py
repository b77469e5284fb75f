"""`trl-qurl serve`: prepare a quantized checkpoint of a model, then exec vLLM's server on it."""

import argparse

from trl_qurl.cli.options import add_ignore, add_scheme, check_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl serve`."""
    parser.epilog = (
        "Needs an API key in the environment variable VLLM_API_KEY, for every request; set the "
        "same for the trainer. Nothing is encrypted."
    )
    parser.add_argument(
        "model", metavar="MODEL", help="full-precision model: name on the Hub, or a local directory"
    )
    add_scheme(parser, " (default: %(default)s)", default="int8")
    add_ignore(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="port to listen on (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Prepare the checkpoint, then exec the server."""
    check_model(args.model)
    from trl_qurl.rollout.engine.guard import require_key

    require_key()  # comes before imports that take many seconds
    from transformers import AutoConfig

    from trl_qurl.config.checks.engine_arguments import check_followed
    from trl_qurl.quantization.plan import read_formats, schemes_of
    from trl_qurl.rollout.checks.hardware import check_cpu_build, kernel_environment
    from trl_qurl.rollout.engine import launch

    launch.require_vllm()
    launch.check_options(args.extra_args)
    options = launch.values_of(args.extra_args)
    check_followed(options, "trl-qurl serve")
    formats = read_formats(args.scheme, "--scheme")
    schemes = schemes_of(formats)
    environment = kernel_environment(*schemes)
    model = launch.resolve_model(args.model)
    config = AutoConfig.from_pretrained(model, trust_remote_code="trust_remote_code" in options)
    check_cpu_build(config, {scheme.name: scheme for scheme in schemes}, options)
    if formats is not None:
        model = str(launch.starting_checkpoint(model, formats, args.ignore, options))
    command = launch.server_command(model, args.host, args.port, args.extra_args)
    return launch.run_server(command, environment)
