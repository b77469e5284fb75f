"""Checks of what a user names on the command line, where the libraries below would answer with a traceback."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path


def check_settings_file(argv: Sequence[str], known_names: Collection[str], command: str) -> None:
    """Check the YAML file that `--config` names, if there is one.

    Args:
        argv: the arguments of the command line.
        known_names: settings the file may hold; `env`, TRL's mapping of environment variables, is always allowed.
        command: `trl-qurl`'s name of the recipe, for the message.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if no file is given, it is not a YAML mapping, or it holds a name that no setting has.
    """
    import yaml

    if "--config" not in argv:
        return
    rest = argv[argv.index("--config") + 1 :]
    if not rest:
        raise ValueError("--config needs the name of a YAML file after it.")
    path = Path(rest[0])
    if not path.is_file():
        raise FileNotFoundError(f"The settings file {path} does not exist; give a YAML file after --config.")
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"The settings file {path} is not valid YAML: {error}.") from error
    if not isinstance(settings, dict):
        raise ValueError(f"The settings file {path} holds no `name: value` lines; write one setting per line.")
    unknown = [str(name) for name in settings if name not in known_names and name != "env"]
    if unknown:
        raise ValueError(
            f"The settings file {path} sets {', '.join(unknown)}, which no setting is called; "
            f"`trl-qurl {command} --help` lists the names."
        )


def check_model(name_or_path: str) -> None:
    """Refuse a local directory that does not hold a model, which would otherwise be taken for a name on the Hub.

    Raises:
        FileNotFoundError: if `name_or_path` looks like a directory and has no `config.json`.
    """
    is_local = name_or_path.startswith((".", "/", "~")) or Path(name_or_path).is_dir()
    if is_local and not (Path(name_or_path).expanduser() / "config.json").is_file():
        raise FileNotFoundError(
            f"There is no model in {name_or_path}; give a directory with a config.json, or a name on the Hub "
            "such as Qwen/Qwen2.5-0.5B-Instruct."
        )
