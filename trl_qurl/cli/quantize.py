"""`trl-qurl quantize`: write a quantized checkpoint of a model, ready for `vllm serve`."""

from __future__ import annotations

import argparse
from pathlib import Path

from trl_qurl.cli.options import add_ignore, check_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl quantize`."""
    from trl_qurl.quantization import SCHEMES
    from trl_qurl.quantization.checkpoint import QUANTIZERS

    parser.add_argument("model", metavar="MODEL", help="name on the Hub, or a local directory")
    parser.add_argument("output_dir", metavar="OUT", type=Path, help="directory to write the checkpoint to")
    parser.add_argument("--scheme", choices=list(SCHEMES), required=True, help="format of the quantized layers")
    add_ignore(parser)
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that ships with the model")
    parser.add_argument(
        "--quantizer",
        choices=QUANTIZERS,
        default="streaming",
        help="quantize with our own code, layer by layer, or with llm-compressor, which must be installed and holds "
        "two copies of the model; the result is the same (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Load the model and write its quantized checkpoint."""
    check_model(args.model)
    from trl_qurl.quantization.checkpoint import check_quantizer, load_model, write_checkpoint
    from trl_qurl.quantization.storage import check_replaceable

    check_quantizer(args.quantizer)  # fail before the model is loaded
    check_replaceable(args.output_dir)

    print(f"Loading {args.model}", flush=True)
    model, tokenizer = load_model(args.model, args.trust_remote_code)
    print(f"Quantizing its weights to {args.scheme.upper()} ({args.quantizer})", flush=True)
    ignore = tuple(args.ignore)
    write_checkpoint(model, tokenizer, args.scheme, args.output_dir, ignore=ignore, quantizer=args.quantizer)
    print(f"{args.scheme.upper()} checkpoint written to {args.output_dir}")
    return 0
