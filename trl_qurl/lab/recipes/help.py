"""`trl-qurl grpo --help`: print essential options first, then those that this project adds or changes, in groups.

`--help-all` prints all options, including those of TRL and transformers.
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

START = {
    "model_name_or_path": None,
    "dataset": None,
    "output_dir": "Directory for the trained policy, its checkpoints and its log.",
    "max_steps": "Optimizer steps; -1 to train for num_train_epochs.",
    "num_train_epochs": "Passes over the questions, if max_steps is -1.",
    "learning_rate": "Peak learning rate.",
    "use_peft": "Train a LoRA adapter (--lora_r, --lora_alpha, --lora_target_modules).",
    "vllm_mode": "colocate: run the engine in this process; server: requires a running `trl-qurl serve`.",
    "resume_from_checkpoint": "Checkpoint to resume from; true for the latest in output_dir.",
}
"""Essential options, with a help text if the option is not ours."""


def print_help(prog: str, classes: Sequence[type], defaults: dict[str, Any]) -> None:
    """Print the options of a recipe; `classes` are its script arguments, config and model arguments."""
    script_arguments, config, _ = classes
    settings = {setting.name: setting for cls in classes for setting in fields(cls)}
    theirs = next(parent.__name__ for parent in config.__mro__ if parent.__module__.startswith("trl."))
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [--config FILE ...] [--OPTION VALUE ...]",
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"All {len(settings)} options, including those of TRL's {theirs} and ModelConfig: {prog} --help-all\n"
        "Each option is also a setting in a YAML file.\n\nexamples:\n"
        f"  {prog} --model Qwen/Qwen2.5-0.5B-Instruct --output_dir policy\n"
        f"  {prog} --model Qwen/Qwen2.5-0.5B-Instruct --dataset questions.jsonl --max_steps 200",
    )
    _add_group(parser, "model, data, length of the run", [settings.pop(name) for name in START], defaults)
    files = parser.add_argument_group("settings files and help")
    files.add_argument(
        "--config",
        metavar="FILE",
        nargs="+",
        help=f"YAML files of settings, or names of recipes ({', '.join(recipes())}); later ones override",
    )
    files.add_argument("--help", action="help", help="this list")
    files.add_argument("--help-all", action="help", help="all options")
    questions = [setting.name for setting in fields(script_arguments)]
    changed = ("settings of TRL that this command changes", [*defaults])
    for title, names in (*groups(config), ("questions and output", questions), changed):
        _add_group(parser, title, [settings.pop(name) for name in names if name in settings], defaults)
    parser.print_help()


def groups(config: type) -> Iterator[tuple[str, list[str]]]:
    """Yield the title and settings of each group (`> Title`) in this project's config docstrings."""
    listed: set[str] = set()
    for cls in config.__mro__:
        if not cls.__module__.startswith("trl_qurl.") or not cls.__doc__:
            continue
        _, *parts = GROUP.split(cls.__doc__.split("Raises:")[0])
        for title, text in zip(parts[::2], parts[1::2], strict=True):
            names = [name for entry in ENTRY.finditer(text) for name in entry["names"].split(", ")]
            new = [name for name in names if name not in listed]
            listed.update(new)
            if new:
                yield title.lower(), new


def _add_group(
    parser: argparse.ArgumentParser, title: str, settings: Sequence[Field], defaults: dict[str, Any]
) -> None:
    group = parser.add_argument_group(title)
    for setting in settings:
        default = defaults.get(setting.name, setting.default)
        note = "" if default in (None, MISSING) else f" (default: {default})"
        text = START.get(setting.name) or setting.metadata.get("help", "")
        names = [f"--{setting.name}", *setting.metadata.get("aliases", ())]
        group.add_argument(*names, metavar="VALUE", help=f"{text}{note}".replace("%", "%%"))
