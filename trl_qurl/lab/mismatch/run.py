"""`trl-qurl mismatch`: sample from one engine per format, score the answers, compute statistics, and advise.

Heavy imports wait until the command runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trl_qurl.cli.options import check_model
from trl_qurl.lab.comparison import BASELINE, add_options, candidates, check_output, write_json
from trl_qurl.lab.mismatch.prompts import Sampling

if TYPE_CHECKING:
    from trl_qurl.lab.mismatch.engines import Engines
    from trl_qurl.lab.mismatch.keep import Kept
    from trl_qurl.lab.mismatch.statistics import Mismatch


@dataclass
class Report:
    """Results of a mismatch measurement."""

    model: str  # name or directory from the command line
    sampling: Sampling
    ignore: tuple[str, ...]  # modules kept in full precision
    formats: dict[str, Mismatch] = field(default_factory=dict)  # by format, `"none"` for a 16-bit engine
    failures: dict[str, str] = field(default_factory=dict)  # why statistics are missing, by format
    kept: Kept | None = None  # layers chosen to stay in 16 bits

    @property
    def by_kernels(self) -> float | None:
        """The KL of a 16-bit engine, which kernels alone cause."""
        return self.formats[BASELINE].kl_k3.value if BASELINE in self.formats else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl mismatch`."""
    parser.epilog = "Samples answers from one engine per format and scores them with the full-precision model."
    parser.add_argument("model", metavar="MODEL", help="full-precision model: Hub name or local directory")
    parser.add_argument(
        "--questions",
        metavar="SOURCE",
        help="a task of `trl-qurl eval` (gsm8k, a .jsonl file, ...) or a .txt file with one prompt per line "
        "(default: 16 built-in questions of mixed kinds)",
    )
    parser.add_argument("--limit", type=int, default=16, metavar="N", help="first N questions (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=4, help="answers per question (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer, in tokens (default: %(default)s)")
    parser.add_argument(
        "--kl", type=float, metavar="NATS", help="choose layers to keep in 16 bits for a KL of at most NATS per token"
    )
    parser.add_argument(
        "--no-smooth", action="store_true", help="measure as with smooth_activations=False (default: INT8 is smoothed)"
    )
    add_options(parser, Path("mismatch.json"))


def run(args: argparse.Namespace) -> int:
    """Measure, print the table and the verdict, and return exit status 0 for any verdict."""
    check_model(args.model)
    check_output(args.output)
    check_formats(args.schemes, args.kl)
    sampling = Sampling(args.questions, args.limit, args.samples, args.max_tokens)

    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from trl_qurl.lab.mismatch.engines import Engines
    from trl_qurl.lab.mismatch.keep import write_settings
    from trl_qurl.lab.mismatch.table import build_layer_table, build_table, sentences

    disable_progress_bar()  # hides the bar for loading weights
    console = Console()
    engines = Engines(args.model, sampling, args.engine_kwargs, console.print, smooths=not args.no_smooth)
    report = measure_mismatch(engines, args.schemes, args.ignore, args.output, args.kl)
    console.print(build_table(report))
    settings = ""
    if report.kept is not None:
        console.print(build_layer_table(report.kept))
        path = args.output.with_suffix(".yaml")
        write_settings(report.kept, path)
        settings = f"Settings for --config: {path}. "
    for line in sentences(report):
        console.print(line)
    print(f"{settings}Results: {args.output}")
    return 0


def measure_mismatch(
    engines: Engines, schemes: Sequence[str] | None, ignore: Sequence[str], output: Path, kl: float | None
) -> Report:
    """Measure how far engines in several formats are from the full-precision policy.

    Args:
        engines: Engines of the model.
        schemes: Format names, without `"none"`; by default all that this machine and the model support.
        ignore: Modules to keep in full precision.
        output: JSON file, rewritten after each format.
        kl: Also choose layers to keep in 16 bits, for at most this KL in nats per token; requires exactly one format.

    Raises:
        ValueError: If the model cannot be quantized, or no choice of layers has so small a KL.
        ChildProcessError: If no engine could answer; the process output says why.
    """
    from trl_qurl.lab.mismatch.keep import keep_layers
    from trl_qurl.lab.mismatch.statistics import measure

    chosen = engines.formats(schemes, ignore)
    names = [BASELINE, *(scheme.name for scheme in chosen)]
    report = Report(engines.model, engines.sampling, tuple(ignore))
    for name in names:
        try:
            report.formats[name] = measure(engines.sample(name, ignore))
        except ChildProcessError as error:
            is_needed = kl is not None and name != BASELINE
            if is_needed or (name == names[-1] and not report.formats):
                raise
            report.failures[name] = str(error)
        else:
            write_json(report, output)
    if kl is not None:
        report.kept, mismatch = keep_layers(engines, chosen[0], report, kl)
        report.formats[report.kept.name] = mismatch
        write_json(report, output)
    return report


def check_formats(schemes: Sequence[str] | None, kl: float | None) -> None:
    """Raise `ValueError` for formats that do not exist, and for a `kl` that is not positive or not for one format."""
    formats = [scheme.name for scheme in candidates(schemes)]
    if kl is None:
        return
    if len(formats) != 1:
        raise ValueError(f"--kl requires exactly one format, but got {', '.join(formats)}: choose one with --schemes.")
    if not kl > 0:
        raise ValueError(f"--kl is {kl:g}: give a positive number of nats per token.")
