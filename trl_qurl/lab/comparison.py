"""What several commands share: options, the formats to compare, a table, a JSON file."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_qurl.cli.options import add_ignore, add_scheme

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedModel

    from trl_qurl.quantization.plan import Formats

BASELINE = "none"
"""Name of rollouts in 16 bits."""


def option(default: Any, text: str) -> Any:
    """Define a field of a dataclass that is also an option."""
    return field(default=default, metadata={"help": text})


def add_numbers(parser: argparse.ArgumentParser, **options: tuple[float, str]) -> None:
    """Add options for numbers, given by their defaults and help texts."""
    for name, (default, text) in options.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(default),
            default=default,
            help=f"{text} (default: %(default)s)",
        )


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raise `ValueError` if one of these options is given, and not positive."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not value > 0:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is {value:g}: give a positive number.")


def add_options(parser: argparse.ArgumentParser, output: Path) -> None:
    """Add the options for formats, engines and the output file."""
    add_schemes(parser, " (default: all that this machine and the model support)")
    add_ignore(parser)
    add_kwargs(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=output,
        help="JSON file with all results (default: %(default)s)",
    )


def add_schemes(parser: argparse.ArgumentParser, note: str, **options: Any) -> None:
    """Add `--scheme` for one or several formats, also to `trl-qurl eval` and `doctor`."""
    add_scheme(parser, note, type=split_schemes, metavar="FORMAT[,FORMAT...]", **options)


def split_schemes(text: str) -> list[str]:
    """Split names with commas between them; a JSON object of formats by pattern is one format."""
    return [text] if text.lstrip().startswith("{") else [name.strip() for name in text.split(",")]


def read_schemes(names: Sequence[str]) -> dict[str, Formats]:
    """Return formats, as `--scheme` lists them, by short name.

    Raises `ValueError` if one is unknown or there twice.
    """
    from trl_qurl.quantization.plan import format_name, read_formats

    formats: dict[str, Formats] = {}
    for name in names:
        form = read_formats(name, "--scheme")
        formats[format_name(form)] = form
    if len(formats) < len(names):
        raise ValueError(f"--scheme is {','.join(names)}: list each format once.")
    return formats


def add_kwargs(
    parser: argparse.ArgumentParser,
    option: str = "--engine-kwargs",
    help: str = "extra arguments for vllm.LLM",
) -> None:
    """Add an option with a JSON dictionary, also to `trl-qurl eval`."""
    parser.add_argument(option, type=json_dictionary, default={}, metavar="JSON", help=help)


def json_dictionary(text: str) -> dict[str, Any]:
    """Parse an argument as a JSON dictionary."""
    try:
        return {**json.loads(text)}
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a JSON dictionary such as {{"enforce_eager": true}}'
        ) from None


def check_output(path: Path) -> None:
    """Create the directory of the output file.

    Raises `ValueError` if it is not a .json file, or cannot be written.
    """
    if path.suffix != ".json":
        raise ValueError(f"--output is {path}: give the name of a .json file.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(
            f"--output is {path}, where no file can be written ({error.strerror}): choose another "
            "directory."
        ) from None


def candidates(names: Sequence[str] | None) -> dict[str, Formats]:
    """Return the named formats, or else all with kernels on this machine; never the baseline."""
    from trl_qurl.rollout.checks.hardware import available_formats

    formats = read_schemes(available_formats() if names is None else names)
    if formats.keys() == {BASELINE}:
        raise ValueError(
            "--scheme is none, but 16 bits are always measured: name a format to compare with them."
        )
    return {name: form for name, form in formats.items() if form is not None}


def fitting_formats(
    model: PreTrainedModel,
    names: Sequence[str] | None,
    ignore: Sequence[str],
    say: Callable[[str], None],
) -> dict[str, Formats]:
    """Return the named formats, or else all that fit the model.

    `say` gets a message for each that is left out. The model's weights are not needed. Raises
    `ValueError` if a requested format does not fit, or there is nothing to quantize;
    `kernel_environment` warns and raises here, too, because the engines' processes are silent.
    """
    from trl_qurl.quantization.plan import make_plan, schemes_of
    from trl_qurl.rollout.checks.hardware import kernel_environment

    fitting = candidates(names)
    for name, formats in [*fitting.items()]:
        try:
            make_plan(model, formats, ignore)
        except ValueError as error:
            if names is not None:
                raise
            say(f"{label(name)} is left out: {error}")
            del fitting[name]
    schemes = chain.from_iterable(map(schemes_of, fitting.values()))
    kernel_environment(*schemes)
    return fitting


def label(name: str | Mapping[str, str]) -> str:
    """Return the display name of a format, or formats by pattern.

    What follows the name stays, as in `int8, 3 kept`.
    """
    if isinstance(name, Mapping):
        name = "-".join(dict.fromkeys(name.values()))
    if name == BASELINE:
        return "16 bits"
    scheme, comma, rest = name.partition(",")
    return scheme.upper() + comma + rest


def new_table(title: str, caption: str, names: Sequence[str], figures: Sequence[str]) -> Table:
    """Start a table: columns that name the rows, and right-aligned columns of figures."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, padding=0
    )
    for heading in names:
        table.add_column(heading, overflow="fold", min_width=6)
    for heading in figures:
        table.add_column(heading, justify="right")
    return table


def write_json(results: object, path: Path) -> None:
    """Write values and dataclasses as JSON, atomically."""
    tmp = path.with_suffix(".tmp")
    tmp.write_text(json.dumps(results, indent=2, default=asdict) + "\n", encoding="utf-8")
    os.replace(tmp, path)
