"""The YAML files that `--config` names: a recipe of settings, and variants of it.

The paper's runs (`paper/`) and ours (`own/`) come with the package, and are found by their names.
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
    """The settings files that come with the package, by name: the paper's runs, their variants, ours."""
    patterns = ("paper/*.yaml", "paper/variants/*.yaml", "own/*.yaml")
    return {path.stem: path for pattern in patterns for path in sorted(HERE.glob(pattern))}


def take_settings(argv: Sequence[str], known_names: Collection[str], command: str) -> tuple[dict[str, Any], list[str]]:
    """Read the YAML files that `--config` names, if there are any; also returns the other arguments.

    A file is named by its path, or by its name if it comes with the package. Each file overrides those before it, so a
    recipe and a variant of it can be given together. A file with `extends: other.yaml` (relative to its own directory,
    or the name of a recipe) starts with the settings of that file.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="*", action="append", default=[])
    given, rest = parser.parse_known_args(argv)
    if [] in given.config:
        raise ValueError("--config needs the name of a YAML file or a recipe after it.")
    settings: dict[str, Any] = {}
    for name in chain(*given.config):
        settings |= _read_settings(_found(name), known_names, command, ())
    return settings, rest


def _found(name: str, extending: Path | None = None) -> Path:
    """A settings file by its path, or a recipe by its name; `extending` is the file that names it, if one does."""
    path = Path(name) if extending is None else extending.parent / name
    if path.is_file():
        return path
    if name in recipes():
        return recipes()[name]
    wanted_by = f" (which {extending} extends)" if extending else ""
    raise FileNotFoundError(
        f"The settings file {path}{wanted_by} does not exist; give a YAML file, or the name of a recipe or a variant: "
        f"{', '.join(recipes())}."
    )


def _read_settings(
    path: Path, known_names: Collection[str], command: str, extending: tuple[Path, ...]
) -> dict[str, Any]:
    """The settings of one file and of those it extends; `extending` are the files that led here."""
    import yaml

    if path.resolve() in extending:
        raise ValueError(f"The settings file {path} extends itself through {extending[-1]}: remove one `extends`.")
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"The settings file {path} is not valid YAML: {error}.") from error
    if not isinstance(settings, dict):
        raise ValueError(f"The settings file {path} has no `name: value` lines; write one setting per line.")
    if "model" in settings:  # the short name, as on the command line
        settings["model_name_or_path"] = settings.pop("model")
    unknown = [str(name) for name in settings if name not in known_names and name not in ("env", "extends")]
    if unknown:
        raise ValueError(
            f"The settings file {path} sets {', '.join(unknown)}, but there is no such setting"
            f"{did_you_mean(unknown, list(known_names))} `trl-qurl {command} --help` lists the names."
        )
    base = settings.pop("extends", None)
    if base is None:
        return settings
    return _read_settings(_found(base, path), known_names, command, (*extending, path.resolve())) | settings
