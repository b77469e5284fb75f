"""Checks of what a user names on the command line, where the libraries below would answer with a traceback."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

EXTENDS = "extends"


def take_settings(argv: Sequence[str], known_names: Collection[str], command: str) -> tuple[dict[str, Any], list[str]]:
    """Read the YAML files that `--config` names, if there are any.

    Each overrides those before it, so that a recipe and a variant of it can be named together. A file that says
    `extends: other.yaml` (seen from its own directory) begins with what that one sets.

    Args:
        argv: the arguments of the command line.
        known_names: settings the files may hold; `env`, TRL's mapping of environment variables, is always allowed.
        command: `trl-qurl`'s name of the recipe, for the message.

    Returns:
        All that the files set, and the arguments without `--config` and its files.

    Raises:
        FileNotFoundError: if a file does not exist.
        ValueError: if no file is given, one is not a YAML mapping, holds an unknown name, or extends itself.
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
            raise ValueError("--config needs the name of a YAML file after it.")
        paths += remaining[:count]
        del remaining[:count]
    settings: dict[str, Any] = {}
    for path in paths:
        settings |= _read_settings(Path(path), known_names, command, ())
    return settings, rest


def _read_settings(
    path: Path, known_names: Collection[str], command: str, extending: tuple[Path, ...]
) -> dict[str, Any]:
    """What one file sets, with what it extends below it; `extending` are the files on the way here."""
    import yaml

    if not path.is_file():
        wanted_by = f" (which {extending[-1]} extends)" if extending else ""
        raise FileNotFoundError(
            f"The settings file {path}{wanted_by} does not exist; give a YAML file after --config."
        )
    if path.resolve() in extending:
        raise ValueError(f"The settings file {path} extends itself, by way of {extending[-1]}; break the circle.")
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"The settings file {path} is not valid YAML: {error}.") from error
    if not isinstance(settings, dict):
        raise ValueError(f"The settings file {path} holds no `name: value` lines; write one setting per line.")
    unknown = [str(name) for name in settings if name not in known_names and name not in ("env", EXTENDS)]
    if unknown:
        raise ValueError(
            f"The settings file {path} sets {', '.join(unknown)}, which no setting is called; "
            f"`trl-qurl {command} --help` lists the names."
        )
    base = settings.pop(EXTENDS, None)
    if base is None:
        return settings
    return _read_settings(path.parent / base, known_names, command, (*extending, path.resolve())) | settings


def check_model(name_or_path: str) -> None:
    """Refuse a local directory that does not hold a model, which would otherwise be taken for a name on the Hub.

    Raises:
        FileNotFoundError: if `name_or_path` looks like a directory and has no `config.json`, or only an adapter's.
    """
    is_local = name_or_path.startswith((".", "/", "~")) or Path(name_or_path).is_dir()
    directory = Path(name_or_path).expanduser()
    if is_local and (directory / "adapter_config.json").is_file() and not (directory / "config.json").is_file():
        raise FileNotFoundError(
            f"{name_or_path} holds an adapter, and what is needed is a whole model: merge the two first, "
            f"peft.AutoPeftModelForCausalLM.from_pretrained({name_or_path!r}).merge_and_unload().save_pretrained("
            "'merged'), or let the run write the merged 8-bit checkpoint itself (trainer.save_quantized(), or "
            "--save_quantized)."
        )
    if is_local and not (directory / "config.json").is_file():
        raise FileNotFoundError(
            f"There is no model in {name_or_path}; give a directory with a config.json, or a name on the Hub "
            "such as Qwen/Qwen2.5-0.5B-Instruct."
        )


def check_chat_template(name_or_path: str, revision: str | None = None) -> None:
    """Refuse a model that was not taught to answer in a conversation, in which the recipes ask their questions.

    Raises:
        ValueError: its tokenizer has no chat template.
    """
    from transformers import AutoTokenizer

    if AutoTokenizer.from_pretrained(name_or_path, revision=revision).chat_template is None:
        raise ValueError(
            f"The tokenizer of {name_or_path} has no chat template, and questions are asked in a conversation: take "
            "the model's Instruct variant, or give its tokenizer a chat_template and save both in one directory."
        )
