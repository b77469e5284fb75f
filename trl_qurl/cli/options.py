"""Options and checks that several subcommands share."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

IGNORED_BY_DEFAULT = ["lm_head"]


class PatternAction(argparse.Action):
    """Collects the values of an option that is given several times; the first one replaces the default."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        """Add one value."""
        collected = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*([] if collected is self.default else collected), value])


def add_ignore(parser: argparse.ArgumentParser) -> None:
    """Add `--ignore PATTERN`, which takes one value each time it is given, so that it cannot swallow positionals."""
    parser.add_argument(
        "--ignore",
        action=PatternAction,
        default=IGNORED_BY_DEFAULT,
        metavar="PATTERN",
        help="modules kept in full precision: a name, or re: and a regular expression; repeat the option for more "
        f"(default: {' '.join(IGNORED_BY_DEFAULT)})",
    )


def json_dictionary(text: str) -> dict[str, Any]:
    """An argument as a JSON dictionary.

    Raises:
        argparse.ArgumentTypeError: If it is anything else; argparse reports it.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON dictionary such as '{{\"enforce_eager\": true}}'")
    return value


def check_model(name_or_path: str) -> None:
    """Refuse a local directory without a model, which the libraries below would look up as a name on the Hub.

    Raises:
        FileNotFoundError: If it looks like a directory and has no `config.json`, or only an adapter's.
    """
    is_local = name_or_path.startswith((".", "/", "~")) or Path(name_or_path).is_dir()
    directory = Path(name_or_path).expanduser()
    if not is_local or (directory / "config.json").is_file():
        return
    if (directory / "adapter_config.json").is_file():
        raise FileNotFoundError(
            f"{name_or_path} holds an adapter, but a whole model is needed: merge the two first with "
            f"peft.AutoPeftModelForCausalLM.from_pretrained({name_or_path!r}).merge_and_unload().save_pretrained("
            "'merged'), or let the training run write the merged quantized checkpoint (trainer.save_quantized(), or "
            "--save_quantized)."
        )
    raise FileNotFoundError(
        f"There is no model in {name_or_path}: give a directory with a config.json, or a name on the Hub such as "
        "Qwen/Qwen2.5-0.5B-Instruct."
    )
