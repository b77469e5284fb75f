"""Arguments of `trl-qurl grpo|ppo|rloo`: TRL's parser, YAML files by path or name for `--config`,
and the help.

`--help` prints essential options first, then those that this project adds or the command changes;
`--help-all` prints all, including those of TRL and transformers.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_qurl.cli.noise import quiet
from trl_qurl.cli.options import did_you_mean
from trl_qurl.lab.device import cpu_settings

if TYPE_CHECKING:
    from trl import ModelConfig

logger = logging.getLogger(__name__)

HERE = Path(__file__).parent
USAGE = "%(prog)s [--config FILE ...] [--OPTION VALUE ...]"

START = {
    "model_name_or_path": None,
    "dataset": None,
    "output_dir": "Directory for the trained policy, its checkpoints and its log.",
    "max_steps": "Optimizer steps; -1 to train for num_train_epochs.",
    "num_train_epochs": "Passes over the questions, if max_steps is -1.",
    "learning_rate": "Peak learning rate.",
    "use_peft": "Train a LoRA adapter (--lora_r, --lora_alpha, --lora_target_modules).",
    "vllm_mode": (
        "colocate: run the engine in this process; server: requires a running `trl-qurl serve`."
    ),
    "resume_from_checkpoint": "Checkpoint to resume from; true for the latest in output_dir.",
}
"""Essential options, with a help text if the option is not ours."""

# as other commands say
ELSEWHERE = {"--scheme": "--rollout_quantization", "--ignore": "--quantization_ignore"}


def parse(
    command: str,
    script_arguments: type,
    defaults: dict[str, Any],
    argv: Sequence[str] | None = None,
) -> tuple[Any, Any, ModelConfig]:
    """Parse a command line and the YAML files of its `--config` into script, trainer and model
    arguments.
    """
    quiet()
    prog = None if argv is None else f"trl-qurl {command}"
    # reports errors before seconds of imports
    files, argv = take_files(sys.argv[1:] if argv is None else argv)

    from trl import ModelConfig, TrlParser

    import trl_qurl

    @dataclass
    class ModelArguments(ModelConfig):
        """TRL's model arguments, with a short name for the model."""

        model_name_or_path: str | None = field(
            default=None,
            metadata={"aliases": ["--model"], "help": "Model to train: a Hub name or a directory."},
        )

    config = getattr(trl_qurl, f"QuRL{command.upper()}Config")
    groups = [script_arguments, config, ModelArguments]
    known_names = {setting.name for group in groups for setting in fields(group)}
    # By default, argparse would print all three hundred options above each error message.
    parser = TrlParser(groups, prog=prog, usage=USAGE, add_help=False, allow_abbrev=False)
    if "--help-all" in argv:
        parser.print_help()
        parser.exit()
    if "--help" in argv or "-h" in argv:
        print_help(parser.prog, groups, defaults)
        parser.exit()
    settings = merge_settings(files, known_names, command)
    os.environ.update(
        {name: str(value) for name, value in (settings.pop("env", None) or {}).items()}
    )
    parser.set_defaults_with_config(**{**cpu_settings(), **defaults, **settings})
    # Report misspelled options before TRL's configurations check values.
    parsed, unknown = parser.parse_known_args(argv)
    if options := [word.partition("=")[0] for word in unknown if word.startswith("--")]:
        words = [ELSEWHERE.get(word := f"--{name[2:].replace('-', '_')}", word) for name in options]
        guess = did_you_mean(words, ["--model", *(f"--{name}" for name in known_names)])
        raise ValueError(f"Unknown option {' '.join(options)}{guess}")
    if unknown:
        raise ValueError(f"Unexpected argument {unknown[0]}; did you mean --dataset {unknown[0]}?")
    check_groups(parsed)
    return parser.parse_args_and_config(argv)


def check_groups(args: argparse.Namespace) -> None:
    """Raise `ValueError` if `num_generations` does not divide the completions of a rollout."""
    processes, groups = int(os.environ.get("WORLD_SIZE", "1")), args.num_generations
    batch, steps = (
        args.per_device_train_batch_size,
        args.steps_per_generation or args.gradient_accumulation_steps,
    )
    size = batch * processes * steps
    divisors = [number for number in range(1, size + 1) if size % number == 0]
    if args.generation_batch_size is None and groups not in divisors:
        factors = (
            f"--per_device_train_batch_size {batch} x {processes} processes x "
            f"--steps_per_generation {steps}"
        )
        ways = f"use one of {', '.join(map(str, divisors))}, or change the other options"
        raise ValueError(
            f"--num_generations {groups} does not divide the {size} completions ({factors}): "
            f"{ways}."
        )


def recipes() -> dict[str, Path]:
    """Return the package's settings files by name: the paper's runs, their variants, and ours."""
    patterns = ("paper/*.yaml", "paper/variants/*.yaml", "own/*.yaml")
    return {path.stem: path for pattern in patterns for path in sorted(HERE.glob(pattern))}


def take_files(argv: Sequence[str]) -> tuple[list[tuple[str, dict[str, Any]]], list[str]]:
    """Take `--config`, `--dataset` and `--eval_tasks` off a command line, and return the rest.

    The names of all files of `--config`, given by path or recipe name, come with their settings;
    last, those of the command line.
    """
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--config", nargs="*", action="append", default=[])
    parser.add_argument("--dataset")
    parser.add_argument("--eval_tasks", "--eval-tasks", nargs="*")
    args, rest = parser.parse_known_args(argv)
    given = vars(args)
    if [] in (names := given.pop("config")):
        raise ValueError("--config requires the name of a YAML file or a recipe.")
    files = [(name, _read_settings(name)) for name in chain(*names)]
    return files + [("the command line", given)] * bool(given), rest


def merge_settings(
    files: list[tuple[str, dict[str, Any]]], known_names: Collection[str], command: str
) -> dict[str, Any]:
    """Merge the settings of all files, of which each overrides the previous ones: a recipe, a
    variant, your own.

    Another data set also overrides `eval_tasks`, which belong to the previous one.
    """
    merged: dict[str, Any] = {}
    for name, settings in files:
        if unknown := [setting for setting in settings if setting not in {*known_names, "env"}]:
            raise ValueError(
                f"The settings file {name} has unknown settings: {', '.join(unknown)}"
                f"{did_you_mean(unknown, list(known_names))} `trl-qurl {command} --help` lists the "
                "names."
            )
        if not isinstance(settings.get("env") or {}, dict):
            raise ValueError(
                f"env in {name} is {settings['env']!r}: write a line `NAME: value` below it for "
                "each variable."
            )
        changed = {"dataset", "eval_tasks"} & settings.keys()
        if (
            changed == {"dataset"}
            and settings["dataset"] != merged.get("dataset")
            and merged.pop("eval_tasks", None)
        ):
            logger.warning("%s sets another dataset, so the previous eval_tasks are dropped.", name)
        merged |= settings
    return merged


def _read_settings(name: str) -> dict[str, Any]:
    import yaml

    path = Path(name) if Path(name).is_file() else recipes().get(name)
    if path is None:
        raise FileNotFoundError(
            f"The settings file {name} does not exist: give a YAML file, or the name of a recipe "
            f"or variant: {', '.join(recipes())}."
        )
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise ValueError(
            f"The settings file {path} is not valid YAML{line}: {problem or error}."
        ) from error
    if not isinstance(settings, dict):
        raise ValueError(
            f"The settings file {path} has no `name: value` lines: write one setting per line."
        )
    if "model" in settings:  # short name, as on the command line
        settings["model_name_or_path"] = settings.pop("model")
    return {str(setting): value for setting, value in settings.items()}


def print_help(prog: str, classes: Sequence[type], defaults: dict[str, Any]) -> None:
    """Print the options of a recipe; `classes` are its script arguments, config and model
    arguments.
    """
    script_arguments, config, _ = classes
    theirs = next(parent for parent in config.__mro__ if parent.__module__.startswith("trl."))
    settings = {setting.name: setting for cls in classes for setting in fields(cls)}
    inherited = {setting.name for setting in fields(theirs)}
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=USAGE,
        add_help=False,
        epilog=(
            f"All {len(settings)} options, including those of TRL's {theirs.__name__} and "
            f"ModelConfig: {prog} --help-all. Each is also a setting in a YAML file. Example: "
            f"{prog} --model Qwen/Qwen2.5-0.5B-Instruct --dataset questions.jsonl --max_steps 200 "
            "--output_dir policy"
        ),
    )
    groups = {
        "model, data, length of the run": START,
        "settings of trl-qurl": [
            setting.name for setting in fields(config) if setting.name not in inherited
        ],
        "questions and output": [setting.name for setting in fields(script_arguments)],
        "settings of TRL that this command changes": defaults,
    }
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        for setting in [settings.pop(name) for name in names if name in settings]:
            default = defaults.get(setting.name, setting.default)
            note = "" if default in (None, MISSING) else f" (default: {default})"
            text = START.get(setting.name) or setting.metadata.get("help", "")
            options = [f"--{setting.name}", *setting.metadata.get("aliases", ())]
            group.add_argument(*options, metavar="VALUE", help=f"{text}{note}".replace("%", "%%"))
    files = parser.add_argument_group("settings files and help")
    files.add_argument(
        "--config",
        metavar="FILE",
        nargs="+",
        help=(
            f"YAML files of settings, or names of recipes ({', '.join(recipes())}); later ones "
            "override"
        ),
    )
    files.add_argument("--help", action="help", help="this list")
    files.add_argument("--help-all", action="help", help="all options")
    parser.print_help()
