"""`trl-qurl quantize`: write a quantized checkpoint of a model, ready for `vllm serve`."""

import argparse
from pathlib import Path

from trl_qurl.cli.options import add_ignore, add_scheme, check_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl quantize`."""
    parser.add_argument("model", metavar="MODEL", help="name on the Hub, or a local directory")
    parser.add_argument(
        "output_dir", metavar="OUT", type=Path, help="directory to write the checkpoint to"
    )
    add_scheme(parser, required=True)
    add_ignore(parser)
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that ships with the model"
    )


def run(args: argparse.Namespace) -> int:
    """Load the model and write its quantized checkpoint."""
    check_model(args.model)
    from trl_qurl.quantization.checkpoint import load_model, write_checkpoint
    from trl_qurl.quantization.checks.output import check_replaceable
    from trl_qurl.quantization.plan import format_name, require_formats

    # All checks come before the model is loaded.
    formats = require_formats(args.scheme, "--scheme")
    check_replaceable(args.output_dir)
    model, tokenizer = load_model(args.model, args.trust_remote_code)
    write_checkpoint(model, tokenizer, formats, args.output_dir, ignore=tuple(args.ignore))
    print(f"{format_name(formats).upper()} checkpoint written to {args.output_dir}")
    return 0
