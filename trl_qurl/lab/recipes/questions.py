"""Train on questions with checkable answers, with any of this project's trainers.

Arguments are TRL's, from the command line or YAML files; each recipe adds its defaults.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_qurl.cli.allocator import keep_freed_memory
from trl_qurl.cli.noise import quiet
from trl_qurl.cli.options import check_model
from trl_qurl.cli.parser import SuggestingParser, did_you_mean
from trl_qurl.lab.device import cpu_settings
from trl_qurl.lab.recipes.help import print_help
from trl_qurl.lab.recipes.settings_files import take_settings

if TYPE_CHECKING:
    from trl import ModelConfig

    from trl_qurl import QuRLGRPOConfig, QuRLRLOOConfig

logger = logging.getLogger(__name__)


DEFAULTS: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    # A rollout of 256 completions gives four updates of 64; with a single update, clipping would have no effect.
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "steps_per_generation": 16,
    "max_completion_length": 512,
    "learning_rate": 1e-5,  # the paper's, on GSM8K
    "logging_steps": 4,
    "logging_first_step": True,
    "save_steps": 100,
}
"""Changes to TRL's defaults in all recipes."""


def option(default: Any, text: str) -> Any:
    """Define a script argument with its default and help text."""
    return field(default=default, metadata={"help": text})


@dataclass
class ScriptArguments:
    """Script arguments: questions, overlong punishment, saving and evaluations."""

    dataset: str = option(
        "openai/gsm8k", "Questions and answers: a Hub name, or a local .json or .jsonl file (or .gz)."
    )
    dataset_config: str = option("main", "Configuration of a Hub dataset.")
    dataset_split: str = option("train", "Split of a Hub dataset.")
    dataset_limit: int | None = option(None, "Train only on the first N questions.")
    question_column: str | None = option(None, "Column of the questions. Defaults to question, problem or prompt.")
    answer_column: str | None = option(None, "Column of the answers. Defaults to answer or final_answer.")
    soft_overlong_cache: int | None = option(
        None,
        "Soft overlong punishment (DAPO): lowers the reward by up to 1 over the last N tokens before "
        "max_completion_length.",
    )
    save_quantized: bool = option(
        False, "Also save the policy's quantized checkpoint for `vllm serve`, to OUTPUT_DIR-FORMAT."
    )
    eval_tasks: list[str] = field(
        default_factory=list, metadata={"help": "Benchmarks to run during training: names, files or name=source."}
    )
    eval_tasks_steps: int = option(100, "Optimizer steps between these evaluations.")
    eval_tasks_limit: int | None = option(None, "Use only the first N questions of each benchmark.")
    eval_tasks_by: str = option("actor", "Model that answers: 'actor' (the engine, fast) or 'policy' (exact, slow).")


@dataclass(frozen=True)
class Recipe:
    """Training with one of our trainers, for scripts and `trl-qurl COMMAND`.

    Attributes:
        command: Name of the subcommand and of the trainer: `grpo`, `ppo` or `rloo`.
        defaults: Changes to TRL's defaults.
        script_arguments: Arguments besides those of the trainer and the model.
    """

    command: str
    defaults: dict[str, Any]
    script_arguments: type[ScriptArguments] = ScriptArguments

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add no options: `parse_arguments` handles all arguments of the subcommand."""

    def run(self, args: argparse.Namespace) -> int:
        """Train with the subcommand's arguments."""
        self.train(*self.parse_arguments(args.extra_args))
        return 0

    def parse_arguments(self, argv: Sequence[str] | None = None) -> tuple[Any, Any, ModelConfig]:
        """Parse a command line and the YAML files of its `--config`."""
        quiet()
        from trl import ModelConfig, TrlParser

        import trl_qurl

        @dataclass
        class ModelArguments(ModelConfig):
            """TRL's model arguments, with a short name for the model."""

            model_name_or_path: str | None = field(
                default=None,
                metadata={"aliases": ["--model"], "help": "Model to train: a Hub name or a directory."},
            )

        class Parser(SuggestingParser, TrlParser):
            """TRL's parser, with suggestions for misspelled values."""

        prog = None if argv is None else f"trl-qurl {self.command}"
        argv = sys.argv[1:] if argv is None else list(argv)
        config = getattr(trl_qurl, f"QuRL{self.command.upper()}Config")
        groups = [self.script_arguments, config, ModelArguments]
        known_names = {setting.name for group in groups for setting in fields(group)}
        # By default, argparse would print all three hundred options above each error message.
        usage = "%(prog)s [--config FILE ...] [--OPTION VALUE ...]"
        parser = Parser(groups, prog=prog, usage=usage, add_help=False)  # type: ignore[arg-type, misc]
        if "--help-all" in argv:
            parser.print_help()
            parser.exit()
        if "--help" in argv or "-h" in argv:
            print_help(parser.prog, groups, self.defaults)
            parser.exit()
        settings, argv = take_settings(argv, known_names, self.command)
        os.environ.update({name: str(value) for name, value in settings.pop("env", {}).items()})
        parser.set_defaults_with_config(**{**cpu_settings(), **self.defaults, **settings})
        _, unknown = parser.parse_known_args(argv)  # report misspelled options before checking any values
        if options := [word.split("=")[0] for word in unknown if word.startswith("--")]:
            names = [option.removeprefix("--").replace("-", "_") for option in options]
            guess = did_you_mean([f"--{name}" for name in names], [f"--{name}" for name in sorted(known_names)])
            advice = f"`trl-qurl {self.command} --help` lists the main options, and --help-all lists all."
            raise ValueError(f"Unknown option {' '.join(options)}{guess} {advice}")
        if unknown:
            raise ValueError(f"Unexpected argument {' '.join(unknown)}: write settings as --NAME VALUE.")
        return parser.parse_args_and_config(argv)

    def train(self, script_args: Any, training_args: Any, model_args: ModelConfig) -> Any:
        """Train on the questions with a reward for correct answers, save to `output_dir`, and return the trainer."""
        quiet()
        keep_freed_memory()
        from trl import get_peft_config

        import trl_qurl
        from trl_qurl.lab.data import load_questions
        from trl_qurl.lab.progress import use_step_lines
        from trl_qurl.rewards import answer_reward

        is_first = training_args.process_index == 0
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")  # only with TRL_QURL_DEBUG=1; see quiet()
        # Log slow steps and the route of weights to the engine in one process only.
        logging.getLogger("trl_qurl").setLevel(logging.INFO if is_first else logging.WARNING)
        if training_args.use_cpu and cpu_settings():
            precision = "bfloat16 autocast" if training_args.bf16 else "float32"
            logger.info("No accelerator found: training on the CPU, in %s (use_cpu, bf16).", precision)
        if script_args.save_quantized and training_args.rollout_quantization is None:
            raise ValueError(
                "save_quantized uses the rollout format, but rollout_quantization is None: set it to a format, or run "
                "`trl-qurl quantize` on the saved policy."
            )
        # Report wrong names before starting an engine.
        checkpoint = checkpoint_to_resume(training_args.resume_from_checkpoint, training_args.output_dir)
        check_model(model_args.model_name_or_path)
        extra_arguments = self.trainer_arguments(script_args)
        logger.info("Loading the questions of %s.", script_args.dataset)
        questions = load_questions(
            script_args.dataset,
            script_args.dataset_split,
            script_args.dataset_config,
            script_args.dataset_limit,
            script_args.question_column,
            script_args.answer_column,
        )
        check_chat_template(model_args.model_name_or_path, model_args.model_revision)
        training_args.model_init_kwargs = {
            "revision": model_args.model_revision,
            "attn_implementation": model_args.attn_implementation,
            "dtype": model_args.dtype,
            **(training_args.model_init_kwargs or {}),
        }
        logger.info("Loading %s.", model_args.model_name_or_path)
        trainer = getattr(trl_qurl, f"QuRL{self.command.upper()}Trainer")(
            model=model_args.model_name_or_path,
            reward_funcs=[answer_reward, *punishments(script_args.soft_overlong_cache, training_args)],
            args=training_args,
            train_dataset=questions,
            peft_config=get_peft_config(model_args),
            callbacks=evaluations(script_args),
            **extra_arguments,
        )
        use_step_lines(trainer)
        if checkpoint:
            logger.info("Resuming from %s.", checkpoint)
        trainer.train(resume_from_checkpoint=checkpoint)
        logger.info("Saving to %s.", training_args.output_dir)
        trainer.save_model(training_args.output_dir)
        quantized = trainer.save_quantized() if script_args.save_quantized else None
        policy = Path(training_args.output_dir)
        trainer.accelerator.print(next_steps(policy, quantized, model_args, script_args.eval_tasks))
        return trainer

    def trainer_arguments(self, script_args: Any) -> dict[str, Any]:
        """Return extra arguments for this recipe's trainer."""
        return {}


def next_steps(policy: Path, quantized: Path | None, model_args: ModelConfig, tasks: Sequence[str]) -> str:
    """Describe where the policy was saved, with the commands to evaluate and serve it."""
    lora = f"--enable-lora --max-lora-rank {max(16, model_args.lora_r)} --lora-modules policy="
    critic = f", and its critic to {policy / 'critic'}" if (policy / "critic").is_dir() else ""
    if (policy / "adapter_config.json").is_file():
        lines = [f"Adapter saved to {policy}{critic}"]
        lines += [f"  serve it:    vllm serve {model_args.model_name_or_path} {lora}{policy}"]
    else:
        lines = [f"Policy saved to {policy}{critic}"]
        lines += [f"  evaluate it: trl-qurl eval {policy} --tasks {','.join(tasks) or 'gsm8k'}"]
        lines += [f"  serve it:    vllm serve {policy}"]
    if quantized is not None:
        adapter = f" {lora}{quantized / 'adapter'}" if (quantized / "adapter").is_dir() else ""
        lines += [f"Quantized checkpoint saved to {quantized}", f"  serve it:    vllm serve {quantized}{adapter}"]
    return "\n".join(lines)


def checkpoint_to_resume(requested: str | bool | None, output_dir: str) -> str | None:
    """Return the checkpoint for `resume_from_checkpoint`: a path, or `true` for the latest one in `output_dir`.

    `true` without a checkpoint is an error, because starting over would replace the log and policy in `output_dir`.
    """
    if requested is None or str(requested).lower() == "false":
        return None
    requested = str(requested)
    # trainer_state.json is written last, so a checkpoint without it is incomplete.
    states = Path(output_dir).glob("checkpoint-*/trainer_state.json")
    complete = sorted((str(state.parent) for state in states), key=lambda path: (len(path), path))
    if requested.lower() == "true":
        if not complete:
            raise FileNotFoundError(
                f"resume_from_checkpoint={requested}: {output_dir} contains no complete checkpoint. To start from the "
                "beginning, remove the option."
            )
        return complete[-1]
    if not Path(requested, "trainer_state.json").is_file():
        raise FileNotFoundError(
            f"resume_from_checkpoint={requested} is not a complete checkpoint: trainer_state.json is missing. "
            f"Complete checkpoints in {output_dir}: {', '.join(complete) or 'none'}."
        )
    return requested


def evaluations(script_args: ScriptArguments) -> list[Any]:
    """Build the callback that runs benchmarks during training, if there are any."""
    from trl_qurl.lab.evaluation.callback import TaskEvaluationCallback

    steps, limit, who = script_args.eval_tasks_steps, script_args.eval_tasks_limit, script_args.eval_tasks_by
    return [TaskEvaluationCallback(tasks, steps, limit, who)] if (tasks := script_args.eval_tasks) else []


def punishments(soft_overlong_cache: int | None, training_args: QuRLGRPOConfig | QuRLRLOOConfig) -> list[Any]:
    """Build TRL's soft overlong punishment, if requested."""
    from trl.rewards import get_soft_overlong_punishment

    if soft_overlong_cache is None:
        return []
    limit = training_args.max_completion_length
    if limit is None or not 0 < soft_overlong_cache < limit:
        raise ValueError(
            f"soft_overlong_cache={soft_overlong_cache} must be between 0 and max_completion_length={limit}."
        )
    return [get_soft_overlong_punishment(limit, soft_overlong_cache)]


def check_chat_template(name_or_path: str, revision: str | None = None) -> None:
    """Raise `ValueError` for a model without a chat template, because the recipes use conversations."""
    from transformers import AutoTokenizer

    if AutoTokenizer.from_pretrained(name_or_path, revision=revision).chat_template is None:
        raise ValueError(
            f"The tokenizer of {name_or_path} has no chat template: use the Instruct variant of the model, or set a "
            "chat_template on its tokenizer and save both together."
        )
