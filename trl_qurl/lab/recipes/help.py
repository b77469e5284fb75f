"""`trl-qurl grpo --help`: the options that this project adds or changes, in groups.

TRL and transformers have about 280 more, which `--help-all` prints.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from trl_qurl.lab.recipes.settings_files import recipes

GROUP = re.compile(r"^ *> (?P<title>.+)$", re.MULTILINE)
ENTRY = re.compile(r"^ +(?P<names>\w+(?:, \w+)*)(?: \([^)\n]*\))?:", re.MULTILINE)


def print_help(prog: str, script_arguments: type, config: type, defaults: dict[str, Any], further: int) -> None:
    """Print the options of a recipe."""
    theirs = next(parent.__name__ for parent in config.__mro__ if parent.__module__.startswith("trl."))
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [--config FILE ...] [--OPTION VALUE ...]",
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"All {further} options, including those of TRL's {theirs} and ModelConfig: {prog} --help-all\n"
        "Each option is also a setting in a YAML file.",
    )
    start = parser.add_argument_group("settings files and help")
    start.add_argument(
        "--config",
        metavar="FILE",
        nargs="+",
        help=f"YAML files of settings, or names of recipes ({', '.join(recipes())}); later ones override",
    )
    start.add_argument("--help", action="help", help="this list")
    start.add_argument("--help-all", action="help", help="all options")
    settings = {setting.name: setting for setting in fields(config)}
    for title, names in groups(config):
        _add_group(parser, title, [settings[name] for name in names if name in settings], defaults)
    _add_group(parser, "questions and output", fields(script_arguments), defaults)
    ours = {name for _, names in groups(config) for name in names}
    common = [settings[name] for name in defaults if name in settings and name not in ours]
    _add_group(parser, "settings of TRL that this command changes", common, defaults)
    parser.print_help()


def groups(config: type) -> Iterator[tuple[str, list[str]]]:
    """The title and the settings of each group that a configuration and its parents document here (`> Title`)."""
    seen: set[str] = set()
    for cls in config.__mro__:
        if not cls.__module__.startswith("trl_qurl.") or not cls.__doc__:
            continue
        _, *parts = GROUP.split(cls.__doc__.split("Raises:")[0])
        for title, text in zip(parts[::2], parts[1::2], strict=True):
            names = [name for entry in ENTRY.finditer(text) for name in entry["names"].split(", ")]
            new = [name for name in names if name not in seen]
            seen.update(new)
            if new:
                yield title.lower(), new


def _add_group(
    parser: argparse.ArgumentParser, title: str, settings: Sequence[Field], defaults: dict[str, Any]
) -> None:
    group = parser.add_argument_group(title)
    for setting in settings:
        default = defaults.get(setting.name, setting.default)
        note = "" if default in (None, MISSING) else f" (default: {default})"
        text = f"{setting.metadata.get('help', '')}{note}".replace("%", "%%")
        group.add_argument(f"--{setting.name}", metavar="VALUE", help=text)
