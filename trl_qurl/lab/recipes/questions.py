"""Train on questions with checkable answers, with any of this project's trainers.

Arguments are TRL's, from the command line or YAML files; each recipe adds its defaults.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import isfunction
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

from trl_qurl.cli.noise import quiet
from trl_qurl.cli.options import check_model
from trl_qurl.lab.comparison import option
from trl_qurl.lab.device import cpu_settings, keep_freed_memory
from trl_qurl.lab.packages import require
from trl_qurl.lab.recipes.arguments import parse
from trl_qurl.lab.recipes.rewards import GRADING, load_rewards, punishments
from trl_qurl.lab.runs import read_run
from trl_qurl.trainers.run_log import RUN_LOG

if TYPE_CHECKING:
    from datasets import Dataset
    from trl import ModelConfig


logger = logging.getLogger(__name__)

DATASET = "openai/gsm8k"

DEFAULTS: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    # A rollout of 256 completions gives four updates of 64; with a single update, clipping would
    # have no effect.
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


@dataclass
class ScriptArguments:
    """Script arguments: questions, overlong punishment, saving and evaluations."""

    dataset: str = option(
        DATASET,
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

    def load_questions(self) -> Dataset:
        """Load the questions, and log how their answers are compared."""
        from trl_qurl.lab.data import load_questions
        from trl_qurl.lab.grading import is_text

        logger.info("Loading the questions of %s.", self.dataset)
        source = self.dataset, self.dataset_split, self.dataset_config, self.dataset_limit
        is_graded, columns = (
            bool(GRADING & {*(self.reward_funcs or GRADING)}),
            bool(self.reward_funcs),
        )
        questions = load_questions(
            *source, self.question_column, self.answer_column, is_graded, columns
        )
        if is_graded:
            texts = sum(map(is_text, questions["solution"]))
            logger.info(
                "%d answers are compared as mathematics, %d as text.", len(questions) - texts, texts
            )
        return questions


@dataclass(frozen=True)
class Recipe:
    """Training with one of our trainers, for scripts and `trl-qurl COMMAND`."""

    command: str  # name of the subcommand and of the trainer: `grpo`, `ppo` or `rloo`
    defaults: dict[str, Any]  # changes to TRL's
    # besides those of the trainer and the model
    script_arguments: type[ScriptArguments] = ScriptArguments

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add no options: `parse_arguments` handles all arguments of the subcommand."""

    def run(self, args: argparse.Namespace) -> int:
        """Train with the subcommand's arguments."""
        self.train(*self.parse_arguments(args.extra_args))
        return 0

    def parse_arguments(self, argv: Sequence[str] | None = None) -> tuple[Any, Any, ModelConfig]:
        """Parse a command line and the YAML files of its `--config`."""
        return parse(self.command, self.script_arguments, self.defaults, argv)

    def train(self, script_args: Any, training_args: Any, model_args: ModelConfig) -> Any:
        """Train on the questions, save to `output_dir`, and return the trainer."""
        quiet()
        keep_freed_memory()
        from transformers.utils.logging import disable_progress_bar
        from trl import get_peft_config

        import trl_qurl
        from trl_qurl.lab.evaluation.callback import TaskEvaluationCallback
        from trl_qurl.lab.progress import use_step_lines
        from trl_qurl.trainers.arguments import check_reward

        _set_up_logging(training_args)
        disable_progress_bar()  # they would come between the lines of the steps
        checkpoint = self._check_arguments(script_args, training_args, model_args)
        rewards = load_rewards(script_args.reward_funcs or ["accuracy_reward"])
        questions = script_args.load_questions()
        try:
            for function in rewards:
                check_reward(function, training_args, {"train_dataset": questions})
        except TypeError as error:  # in a script it is a bug, but here a wrong column
            raise ValueError(str(error)) from error
        check_prompts(training_args, model_args)
        evaluations = []
        tasks = script_args.eval_tasks
        if tasks:
            steps = script_args.eval_tasks_steps
            limit = script_args.eval_tasks_limit
            evaluations.append(TaskEvaluationCallback(tasks, steps, limit))
        loading = {"revision": model_args.model_revision, "dtype": model_args.dtype}
        loading["attn_implementation"] = model_args.attn_implementation
        training_args.model_init_kwargs = loading | (training_args.model_init_kwargs or {})
        logger.info("Loading %s.", model_args.model_name_or_path)
        trainer = getattr(trl_qurl, f"QuRL{self.command.upper()}Trainer")(
            model=model_args.model_name_or_path,
            reward_funcs=[*rewards, *punishments(script_args.soft_overlong_cache, training_args)],
            args=training_args,
            train_dataset=questions,
            peft_config=get_peft_config(model_args),
            callbacks=evaluations,
            **({"value_model": script_args.value_model} if self.command == "ppo" else {}),
        )
        use_step_lines(trainer)
        if checkpoint:
            logger.info("Resuming from %s.", checkpoint)
        self._learn(trainer, checkpoint)
        self._save_policy(trainer, script_args, model_args)
        return trainer

    def _save_policy(self, trainer: Any, script_args: Any, model_args: ModelConfig) -> None:
        """Save the policy, and say where, and what to run next."""
        output_dir = trainer.args.output_dir
        logger.info("Saving to %s.", output_dir)
        trainer.save_model(output_dir)
        saved = f"Policy saved to {output_dir}"
        if script_args.save_quantized:
            saved += f", and its quantized checkpoint to {trainer.save_quantized()}"
        if not model_args.use_peft:  # an adapter would have to be merged first
            tasks = ",".join(script_args.eval_tasks)
            if not tasks:
                tasks = "gsm8k" if script_args.dataset == DATASET else "FILE  # other questions"
            command = f"report {output_dir}"
            # `eval` knows no other reward.
            if GRADING & {*(script_args.reward_funcs or GRADING)}:
                command = f"eval {output_dir} --tasks {tasks}"
            saved += f"\nNext: trl-qurl {command}"
        trainer.accelerator.print(saved)

    def _learn(self, trainer: Any, checkpoint: str | None) -> None:
        """Train; after Ctrl-C, name the latest checkpoint, and after a fault in a reward function
        its place.
        """
        from trl_qurl.lab.progress import live_line

        # a tied head is in no checkpoint
        if trainer.model.config.get_text_config().tie_word_embeddings:
            missing = "There were missing keys in the checkpoint model loaded: ['lm_head.weight']."
            logging.getLogger("transformers.trainer").addFilter(
                lambda record: record.getMessage() != missing
            )
        try:
            with live_line(trainer):
                trainer.train(resume_from_checkpoint=checkpoint)
        except KeyboardInterrupt:
            *_, latest = "", *complete_checkpoints(trainer.args.output_dir)
            way = (
                f"to continue from {latest}, add --resume_from_checkpoint true"
                if latest
                else "no checkpoint yet"
            )
            raise KeyboardInterrupt(way) from None
        except Exception as error:
            files = {
                function.__code__.co_filename
                for function in trainer.reward_funcs
                if isfunction(function)
            }
            *_, at = (
                None,
                *(frame for frame in extract_tb(error.__traceback__) if frame.filename in files),
            )
            if at is None:
                raise
            raise ValueError(
                f"A reward function failed in {at.filename}, line {at.lineno}: {error!r}"
            ) from error

    def _check_arguments(
        self, script_args: Any, training_args: Any, model_args: ModelConfig
    ) -> str | None:
        """Report wrong names before starting an engine, and
        return the checkpoint to resume from.
        """
        from transformers.integrations import get_available_reporting_integrations

        if GRADING & {*(script_args.reward_funcs or GRADING)}:
            require("Grading answers", "math_verify", extra="math")
        available = get_available_reporting_integrations()
        # never listed
        if missing := {*training_args.report_to}.difference(available, ("azure_ml", "flyte")):
            ways = f"install its package, or use {', '.join(available)} or none"
            raise ValueError(
                f"--report_to {' '.join(missing)} is unknown or not installed: {ways}."
            )
        if script_args.save_quantized and training_args.rollout_quantization is None:
            raise ValueError(
                "save_quantized uses the rollout format, but rollout_quantization is None: set it "
                "to a format, or run `trl-qurl quantize` on the saved policy."
            )
        checkpoint = checkpoint_to_resume(
            training_args.resume_from_checkpoint, training_args.output_dir
        )
        if checkpoint:
            tell_other_format(
                Path(training_args.output_dir, RUN_LOG), training_args.rollout_quantization
            )
        for name in filter(
            None, (model_args.model_name_or_path, vars(script_args).get("value_model"))
        ):
            check_model(name)
        return checkpoint


def _set_up_logging(training_args: Any) -> None:
    # only with TRL_QURL_DEBUG=1; see quiet()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    if training_args.world_size == 1:
        for handler in logging.root.handlers:
            handler.addFilter(_without_rank)
    # Log slow steps and the route of weights to the engine in one process only.
    logging.getLogger("trl_qurl").setLevel(
        logging.WARNING if training_args.process_index else logging.INFO
    )
    if training_args.use_cpu and cpu_settings():
        precision = "bfloat16 autocast" if training_args.bf16 else "float32"
        logger.info("No accelerator found: training on the CPU, in %s (use_cpu, bf16).", precision)


def _without_rank(record: logging.LogRecord) -> bool:
    record.msg = str(record.msg).removeprefix("[RANK 0] ")
    return True


def complete_checkpoints(output_dir: str) -> list[str]:
    """Return the checkpoints that a run can resume from, the latest last: trainer_state.json is
    written last.
    """
    states = Path(output_dir).glob("checkpoint-*/trainer_state.json")
    return sorted((str(state.parent) for state in states), key=lambda path: (len(path), path))


def checkpoint_to_resume(requested: str | bool | None, output_dir: str) -> str | None:
    """Return the checkpoint for `resume_from_checkpoint`: a path, or `true` for the latest one in
    `output_dir`.

    `true` without a checkpoint is an error, because starting over would replace the log and policy
    in `output_dir`.
    """
    if str(requested or False).lower() == "false":
        return None
    complete = complete_checkpoints(output_dir)
    is_latest = str(requested).lower() == "true"
    checkpoint = next(reversed(complete), None) if is_latest else str(requested)
    if checkpoint is None or not Path(checkpoint, "trainer_state.json").is_file():
        raise FileNotFoundError(
            f"resume_from_checkpoint={requested}: no complete checkpoint, which has a "
            f"trainer_state.json. Complete checkpoints in {output_dir}: "
            f"{', '.join(complete) or 'none'}. To start over, remove the option."
        )
    return checkpoint


def tell_other_format(log: Path, formats: Any) -> None:
    """Warn if the run that is resumed had rollouts in other formats, according to its log."""
    before = read_run(log).settings.get("rollout_quantization") if log.exists() else formats
    if before != formats:
        logger.warning(
            "Resuming with rollout_quantization=%s; it was %s.", formats or "none", before or "none"
        )


def check_prompts(training_args: Any, model_args: ModelConfig) -> None:
    """Raise `ValueError` for a tokenizer without a chat template, or a context without room.

    The trainer measures the prompts themselves.
    """
    from transformers import AutoTokenizer, PretrainedConfig

    name, revision = model_args.model_name_or_path, model_args.model_revision
    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    if tokenizer.chat_template is None:
        raise ValueError(
            f"The tokenizer of {name} has no chat template: use the Instruct variant of the model, "
            "or set a chat_template on its tokenizer and save both together."
        )
    settings = PretrainedConfig.get_config_dict(name, revision=revision)[0]
    model_context = settings.get("text_config", settings).get("max_position_embeddings")
    context = training_args.vllm_max_model_length or model_context or sys.maxsize
    setting = "--vllm_max_model_length, or the model's"
    if (limit := training_args.max_completion_length or 0) >= context:
        problem = (
            f"--max_completion_length allows {limit} tokens, which fill the context of {context} "
            f"({setting})"
        )
        raise ValueError(f"{problem}: use {context // 2}, for example.")
