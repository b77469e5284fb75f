"""Arguments of `trl-qurl grpo|ppo|rloo`: TRL's parser, YAML files by path or name for `--config`,
and the help.

`--help` prints essential options, and those that this project adds or the command changes;
`--help-all` prints all, including those of TRL and transformers.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_qurl.config.checks.names import explain
from trl_qurl.lab.comparison import option
from trl_qurl.lab.contract import tree
from trl_qurl.lab.device import cpu_settings, use_one_gpu

if TYPE_CHECKING:
    from trl import ModelConfig

HERE = Path(__file__).parent

SHARED: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    # A rollout of 256 completions gives four updates of 64; with a single update, clipping would
    # have no effect.
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "steps_per_generation": 16,
    "num_generations": 8,
    "max_completion_length": 512,
    "learning_rate": 1e-5,  # the paper's, on GSM8K
    "lr_scheduler_type": "constant_with_warmup",
    "logging_steps": 4,
    "logging_first_step": True,
    "save_steps": 100,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": SHARED | {"output_dir": "qurl-gsm8k", "warmup_steps": 20},
    # The paper's GSM8K run: 256 prompts with one answer of up to 512 tokens each, learning rate
    # 1e-5, 15 epochs = 435 rollouts, UAQ off. The paper does not state the updates per rollout;
    # verl's example of this run makes four of 64.
    "ppo": SHARED
    | {
        "output_dir": "qurl-gsm8k-ppo",
        "num_generations": 1,
        "max_steps": 4 * 435,
        "lr_scheduler_type": "constant",
    },
    # One update per rollout, as in REINFORCE: with hundreds of tokens per answer, its ratio soon
    # leaves the clip range.
    "rloo": SHARED
    | {
        "output_dir": "qurl-gsm8k-rloo",
        "gradient_accumulation_steps": 16,
        "logging_steps": 1,
        "save_steps": 25,
        "warmup_steps": 5,
    },
}
"""Changes to TRL's defaults, by command."""

START = {
    "model_name_or_path": "Model to train: a name on the Hub, or a directory.",
    "use_peft": "Train a LoRA adapter (lora_r, lora_alpha, lora_target_modules).",
    "output_dir": "Directory for the trained policy, its checkpoints and its log.",
    "max_steps": "Optimizer steps; -1 to train for num_train_epochs.",
    "num_train_epochs": "Passes over the questions, if max_steps is -1.",
    "learning_rate": "Peak learning rate.",
    "warmup_steps": "Steps over which the learning rate rises.",
    "lr_scheduler_type": "How the learning rate changes, such as cosine or linear.",
    "per_device_train_batch_size": "Answers per forward pass, in each process.",
    "gradient_accumulation_steps": "Passes per update.",
    "steps_per_generation": "Passes per rollout: more than gradient_accumulation_steps make "
    "several updates per rollout.",
    "num_generations": "Answers to each question.",
    "max_completion_length": "Longest answer, in tokens.",
    "temperature": "Sampling temperature of the rollouts.",
    "beta": "Weight of the KL penalty for leaving the initial policy; 0 for none.",
    "bf16": "Train under bfloat16 autocast.",
    "fp16": "Train under float16 autocast, for GPUs without bfloat16 (T4).",
    "logging_steps": "Updates between rows of the log.",
    "save_steps": "Updates between checkpoints.",
    "report_to": "Where to draw curves: wandb, trackio, tensorboard; or none.",
    "vllm_mode": "colocate: an engine in this process; server: a running `trl-qurl serve`.",
    "vllm_server_base_url": "Address of that server.",
    "vllm_gpu_memory_utilization": "Share of the GPU's memory for an engine in this process.",
    "vllm_max_model_length": "Longest prompt and answer together, in tokens.",
    "resume_from_checkpoint": "A checkpoint; true for the last complete one in output_dir.",
}
"""Options of TRL that `--help` lists besides those that a command changes, in our words."""

CONFIGURATIONS = (
    "transformers.training_args",
    "trl.trainer.base_config",
    "trl.trainer.grpo_config",
    "trl.trainer.rloo_config",
    "trl.trainer.model_config",
    "trl_qurl.config.rollout",
    "trl_qurl.config.grpo",
    "trl_qurl.config.ppo",
    "trl_qurl.config.rloo",
    __name__,
)
"""Modules with the fields that are settings."""


@dataclass
class ScriptArguments:
    """Script arguments: questions, rewards, saving and evaluations."""

    dataset: str = option(
        "openai/gsm8k",
        "Questions and answers: a Hub name, or a local .json, .jsonl, .csv or .parquet file.",
    )
    dataset_config: str = option("main", "Configuration of a Hub dataset.")
    dataset_split: str = option("train", "Split of a Hub dataset.")
    dataset_limit: int | None = option(None, "Train only on the first N questions.")
    question_column: str | None = option(
        None, "Column of the questions. Defaults to question, problem or prompt."
    )
    answer_column: str | None = option(
        None, "Column of the answers. Defaults to answer, final_answer, solution or ground_truth."
    )
    reward_funcs: list[str] | None = option(
        None,
        "Reward functions, by default accuracy_reward; also reasoning_accuracy_reward, "
        "think_format_reward, get_soft_overlong_punishment, and import paths (my_rewards.length), "
        "which get all columns of the data.",
    )
    soft_overlong_cache: int | None = option(
        None,
        "Soft overlong punishment (DAPO): lowers the reward by up to 1 over the last N tokens "
        "before max_completion_length.",
    )
    save_quantized: bool = option(
        False, "Also save the policy's quantized checkpoint for `vllm serve`, to OUTPUT_DIR-FORMAT."
    )
    eval_tasks: list[str] = field(
        default_factory=list,
        metadata={"help": "Benchmarks to run during training: names, files or name=source."},
    )
    eval_tasks_steps: int = option(100, "Optimizer steps between these evaluations.")
    eval_tasks_limit: int | None = option(None, "Use only the first N questions of each benchmark.")


@dataclass
class CriticArguments(ScriptArguments):
    """Script arguments of PPO."""

    value_model: str | None = option(None, "Initial model of the critic. Defaults to the policy's.")


def parse(command: str, argv: Sequence[str]) -> tuple[ScriptArguments, Any, ModelConfig]:
    """Parse a command line and the YAML files of its `--config` into script, trainer and model
    arguments.
    """
    # Both report errors before seconds of imports.
    settings, argv = take_settings(argv)
    check_names(settings, argv)
    use_one_gpu()

    from trl import ModelConfig, TrlParser

    import trl_qurl

    script = CriticArguments if command == "ppo" else ScriptArguments
    config = getattr(trl_qurl, f"QuRL{command.upper()}Config")
    lists_all = "--help-all" in argv
    shown = essential(command, script, config)

    class Parser(TrlParser):
        """TRL's parser, whose help lists essential options, each with one spelling."""

        def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
            if names[0] == "--model_name_or_path":
                names = ("--model", *names)
                settings["dest"] = "model_name_or_path"
            action = super().add_argument(*names, **settings)
            action.option_strings = action.option_strings[:1]
            action.metavar = "VALUE"
            if action.dest in START:
                action.help = START[action.dest]
            elif not lists_all and action.dest not in shown:
                action.help = argparse.SUPPRESS
            return action

        def format_help(self) -> str:
            """Leave out defaults that say nothing."""
            return re.sub(r"\s+\(default:\s+(None|\[\]|{})\)", "", super().format_help())

    parser = Parser(
        [ModelConfig, script, config],
        prog=f"trl-qurl {command}",
        usage="%(prog)s [--config FILE ...] [--OPTION VALUE ...]",
        description="Example: %(prog)s --model Qwen/Qwen2.5-1.5B-Instruct --config lora_w4",
        epilog="Each option is also a setting in a YAML file. --help-all lists TRL's others.",
        allow_abbrev=False,
    )
    parser.add_argument("--help-all", action="help", default=argparse.SUPPRESS)
    parser.add_argument(
        "--config",
        default=argparse.SUPPRESS,
        help=f"YAML files, or names of recipes ({', '.join(recipes())}); later ones override",
    )
    unread = parser.set_defaults_with_config(**{**cpu_settings(), **DEFAULTS[command], **settings})
    # Report misspelled options before TRL's configurations check values.
    known, unknown = parser.parse_known_args(argv)
    unknown = [*unread, *unknown]
    if unknown:
        raise unknown_names(unknown, vars(known))
    model_args, script_args, training_args = parser.parse_args_into_dataclasses(argv)
    return script_args, training_args, model_args


def check_names(settings: Iterable[str], argv: Sequence[str]) -> None:
    """Raise `ValueError` for names that are not fields in the sources of the configurations."""
    fields = {"model", "config", "help", "help_all"}
    for module in CONFIGURATIONS:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                fields.add(node.target.id)
    unknown = [name for name in settings if name not in fields]
    for word in argv:
        name = plain_name(word)
        if word.startswith("--") and not {name, name.removeprefix("no_")} & fields:
            unknown.append(word)
    if unknown:
        raise unknown_names(unknown, fields)


def plain_name(word: str) -> str:
    """Return the name of the setting that an option gives."""
    return word.partition("=")[0].lstrip("-").replace("-", "_")


def unknown_names(unknown: Sequence[str], names: Iterable[str]) -> ValueError:
    """Return the error for options and settings that do not exist; it suggests others."""
    words = [plain_name(word) if word.startswith("--") else word for word in unknown]
    explained = explain(words, ["model", *names])
    return ValueError(f"Unknown option or setting (--help-all lists them): {explained}")


def recipes() -> dict[str, Path]:
    """Return the package's settings files by name: the paper's runs, their variants, and ours."""
    patterns = ("paper/*.yaml", "paper/variants/*.yaml", "own/*.yaml")
    return {path.stem: path for pattern in patterns for path in sorted(HERE.glob(pattern))}


def take_settings(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Take `--config`, `--dataset` and `--eval_tasks` off a command line, and return the rest.

    The settings of each file override those of the previous ones: a recipe, a variant, your own.
    Another data set also overrides `eval_tasks`, which belong to the previous one.
    """
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--config", nargs="+", action="extend", default=[])
    parser.add_argument("--dataset")
    parser.add_argument("--eval_tasks", "--eval-tasks", nargs="*")
    args, rest = parser.parse_known_args(argv)
    given = vars(args)
    merged: dict[str, Any] = {}
    for settings in [*map(_read_settings, given.pop("config")), given]:
        if "dataset" in settings and settings["dataset"] != merged.get("dataset"):
            merged.pop("eval_tasks", None)
        merged |= settings
    return merged, rest


def _read_settings(name: str) -> dict[str, Any]:
    import yaml

    path = Path(name) if Path(name).is_file() else recipes().get(name)
    if path is None:
        raise FileNotFoundError(
            f"The settings file {name} does not exist: give a YAML file, or the name of a recipe "
            f"or variant: {', '.join(recipes())}."
        )
    try:
        with path.open(encoding="utf-8") as file:
            settings = yaml.safe_load(file)
    except yaml.YAMLError as error:
        raise ValueError(f"The settings file is not valid YAML: {error}. Correct it.") from error
    if not isinstance(settings, dict):
        raise ValueError(
            f"The settings file {path} has no settings: write lines of the form `NAME: value`."
        )
    if "model" in settings:  # short name, as on the command line
        settings["model_name_or_path"] = settings.pop("model")
    return {str(name): value for name, value in settings.items()}


def essential(command: str, script: type, config: type) -> set[str]:
    """Return the names of our options, and of TRL's that most runs need or a command changes."""
    theirs = next(parent for parent in config.__mro__ if parent.__module__.startswith("trl."))
    added = {setting.name for setting in (*fields(script), *fields(config))}
    added.difference_update(setting.name for setting in fields(theirs))
    return {"config", "help", *START, *DEFAULTS[command], *added}
