"""The YAML files that `--config` names: a recipe of settings, and variants of it.

The paper's runs come with the package (`paper/`), and are found by their names.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from trl_qurl.cli.parser import did_you_mean

EXTENDS = "extends"
PAPER = Path(__file__).parent / "paper"


def recipes() -> dict[str, Path]:
    """The settings files that come with the package, by name: the paper's runs, then their variants."""
    return {path.stem: path for pattern in ("*.yaml", "variants/*.yaml") for path in sorted(PAPER.glob(pattern))}


def take_settings(argv: Sequence[str], known_names: Collection[str], command: str) -> tuple[dict[str, Any], list[str]]:
    """Read the YAML files that `--config` names, if there are any.

    A file is named by its path, or by its name if it comes with the package. Each file overrides those before it, so a
    recipe and a variant of it can be given together. A file with `extends: other.yaml` (relative to its own directory,
    or the name of a recipe) starts with the settings of that file.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If no file is given, or if one is not a YAML mapping, holds an unknown name, or extends itself.
    """
    paths: list[str] = []
    rest: list[str] = []
    remaining = list(argv)
    while remaining:
        argument = remaining.pop(0)
        if argument != "--config":
            rest.append(argument)
            continue
        count = next((i for i, name in enumerate(remaining) if name.startswith("-")), len(remaining))
        if count == 0:
            raise ValueError("--config needs the name of a YAML file or a recipe after it.")
        paths += remaining[:count]
        del remaining[:count]
    settings: dict[str, Any] = {}
    for path in paths:
        settings |= _read_settings(_found(path), known_names, command, ())
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
    unknown = [str(name) for name in settings if name not in known_names and name not in ("env", EXTENDS)]
    if unknown:
        raise ValueError(
            f"The settings file {path} sets {', '.join(unknown)}, but there is no such setting"
            f"{did_you_mean(unknown, list(known_names))} `trl-qurl {command} --help` lists the names."
        )
    base = settings.pop(EXTENDS, None)
    if base is None:
        return settings
    return _read_settings(_found(base, path), known_names, command, (*extending, path.resolve())) | settings
