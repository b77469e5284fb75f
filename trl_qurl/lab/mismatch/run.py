"""`trl-qurl mismatch`: sample from one engine per format, score the answers, and advise.

Heavy imports wait until the command runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trl_qurl.cli.options import check_model
from trl_qurl.lab.comparison import (
    BASELINE,
    add_numbers,
    add_options,
    candidates,
    check_output,
    check_positive,
    fitting_formats,
    split_schemes,
    write_json,
)

MEASURED_CACHES = ("fp8", "fp8_per_token_head", "int8_per_token_head")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl mismatch`."""
    parser.epilog = (
        "Samples answers from one engine per format and scores them with the full-precision model."
    )
    parser.add_argument(
        "model", metavar="MODEL", help="full-precision model: Hub name or local directory"
    )
    parser.add_argument(
        "--questions",
        metavar="SOURCE",
        help=(
            "a task of `trl-qurl eval` (gsm8k, a .jsonl file, ...) or a .txt file with one prompt "
            "per line (default: 16 built-in questions of mixed kinds)"
        ),
    )
    add_numbers(
        parser,
        limit=(16, "first questions"),
        samples=(4, "answers per question"),
        max_tokens=(128, "longest answer, in tokens"),
    )
    parser.add_argument(
        "--kl",
        type=float,
        metavar="NATS",
        help="choose finer formats for layers of int8 (--scheme): at most this KL",
    )
    parser.add_argument(
        "--kv",
        type=split_schemes,
        default=[],
        metavar="CACHE[,CACHE...]",
        help=f"formats of the key-value cache to measure, of {', '.join(MEASURED_CACHES)}",
    )
    parser.add_argument(
        "--no-smooth",
        action="store_true",
        help="measure as with smooth_activations=False (default: INT8 is smoothed)",
    )
    add_options(parser, Path("mismatch.json"))


def run(args: argparse.Namespace) -> int:
    """Measure, print the table and the verdict, and return exit status 0 for any verdict."""
    check_arguments(args)

    import yaml
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from trl_qurl.lab.mismatch.engines import Engines, is_simulated
    from trl_qurl.lab.mismatch.finer import choose_finer
    from trl_qurl.lab.mismatch.report import Report
    from trl_qurl.lab.mismatch.table import build_layer_table, build_table, sentences

    disable_progress_bar()  # hides the bar for loading weights
    console = Console()
    engines = Engines(args, console.print)
    schemes = fitting_formats(engines.policy, args.scheme, args.ignore, console.print)
    names = ("questions", "limit", "samples", "max_tokens", "ignore")
    report = Report(args.model, {name: getattr(args, name) for name in names})
    report.settings["prompt_tokens"] = sum(map(len, engines.prompts)) / len(engines.prompts)
    for name, formats in {BASELINE: BASELINE, **schemes}.items():
        report.formats[name] = engines.measure(formats)
        write_json(report, args.output)
    for cache in args.kv:
        name = f"{cache}, simulated" if is_simulated(cache) else cache
        report.caches[name] = engines.measure_cache(cache)
        write_json(report, args.output)
    if args.kl is not None:
        report.choice, mismatch = choose_finer(engines, args.scheme[0], report, args.kl)
        report.formats[report.choice.name] = mismatch
        write_json(report, args.output)
    console.print(build_table(report))
    if report.choice is not None:
        console.print(build_layer_table(report.choice))
        values = {"rollout_quantization": report.choice.formats, "quantization_ignore": args.ignore}
        text = yaml.safe_dump(values, sort_keys=False)
        path = args.output.with_suffix(".yaml")
        path.write_text(text, encoding="utf-8")
        print(f"{path}, for --config:\n\n{text}")
    for line in sentences(report):
        console.print(line)
    print(f"Results: {args.output}")
    return 0


def check_arguments(args: argparse.Namespace) -> None:
    """Raise `ValueError` for what cannot be measured, and choose the format for `--kl`."""
    check_model(args.model)
    check_output(args.output)
    check_positive(args, "limit", "samples", "max_tokens")
    caches = set(args.kv)
    if not caches.issubset(MEASURED_CACHES) or len(caches) < len(args.kv):
        raise ValueError(
            f"--kv is {','.join(args.kv)}: list some of {', '.join(MEASURED_CACHES)}, each once."
        )
    if caches and "kv_cache_dtype" in args.engine_kwargs:
        raise ValueError(
            "--kv compares caches with one in 16 bits: leave kv_cache_dtype out of --engine-kwargs."
        )
    if args.kl is None:
        candidates(args.scheme)
        return
    args.scheme = args.scheme or ["int8"]
    if not args.kl > 0:
        raise ValueError(f"--kl is {args.kl:g}: give a positive number of nats per token.")
    if [*candidates(args.scheme).values()] != args.scheme[:1]:
        raise ValueError(
            f"--kl requires exactly one format, but got {', '.join(args.scheme)}: choose one with "
            "--scheme."
        )
