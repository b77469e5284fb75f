"""YAML files for `--config`: recipes of settings, and their variants.

The paper's runs (`paper/`) and ours (`own/`) come with the package and are available by name.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from trl_qurl.cli.parser import did_you_mean

HERE = Path(__file__).parent


def recipes() -> dict[str, Path]:
    """Return the package's settings files by name: the paper's runs, their variants, and ours."""
    patterns = ("paper/*.yaml", "paper/variants/*.yaml", "own/*.yaml")
    return {path.stem: path for pattern in patterns for path in sorted(HERE.glob(pattern))}


def take_settings(argv: Sequence[str], known_names: Collection[str], command: str) -> tuple[dict[str, Any], list[str]]:
    """Read the YAML files of `--config`, and return their settings and the other arguments.

    Files are given by path or, if they come with the package, by name. Each file overrides the previous ones, so you
    can combine a recipe with a variant. A file with `extends: other.yaml` (relative to the file's directory, or the
    name of a recipe) starts from the settings of that file.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="*", action="append", default=[])
    args, rest = parser.parse_known_args(argv)
    if [] in args.config:
        raise ValueError("--config requires the name of a YAML file or a recipe.")
    settings: dict[str, Any] = {}
    for name in chain(*args.config):
        settings |= _read_settings(_find_file(name), known_names, command, ())
    return settings, rest


def _find_file(name: str, extending: Path | None = None) -> Path:
    """Find a settings file by path, or a recipe by name; `extending` is the file that extends it, if any."""
    path = Path(name) if extending is None else extending.parent / name
    if path.is_file():
        return path
    if name in recipes():
        return recipes()[name]
    origin = f" (extended by {extending})" if extending else ""
    raise FileNotFoundError(
        f"The settings file {path}{origin} does not exist: give a YAML file, or the name of a recipe or variant: "
        f"{', '.join(recipes())}."
    )


def _read_settings(
    path: Path, known_names: Collection[str], command: str, extending: tuple[Path, ...]
) -> dict[str, Any]:
    """Read the settings of a file and the files it extends; `extending` is the chain of files that led here."""
    import yaml

    if path.resolve() in extending:
        raise ValueError(f"The settings file {path} extends itself through {extending[-1]}: remove one `extends`.")
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"The settings file {path} is not valid YAML: {error}.") from error
    if not isinstance(settings, dict):
        raise ValueError(f"The settings file {path} has no `name: value` lines: write one setting per line.")
    if "model" in settings:  # short name, as on the command line
        settings["model_name_or_path"] = settings.pop("model")
    unknown = [str(name) for name in settings if name not in known_names and name not in ("env", "extends")]
    if unknown:
        raise ValueError(
            f"The settings file {path} has unknown settings: {', '.join(unknown)}"
            f"{did_you_mean(unknown, list(known_names))} `trl-qurl {command} --help` lists the names."
        )
    base = settings.pop("extends", None)
    if base is None:
        return settings
    return _read_settings(_find_file(base, path), known_names, command, (*extending, path.resolve())) | settings
