"""`trl-qurl grpo|ppo|rloo`: TRL's script with our trainers, on questions with checkable answers."""

from __future__ import annotations

import argparse
import logging
from contextlib import suppress
from inspect import getfile, isfunction
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

from trl_qurl.cli.noise import quiet
from trl_qurl.cli.options import check_model
from trl_qurl.lab.device import cpu_settings, keep_freed_memory
from trl_qurl.lab.packages import require
from trl_qurl.lab.processes import name_of_command
from trl_qurl.lab.recipes.arguments import ScriptArguments, parse
from trl_qurl.lab.recipes.rewards import GRADING, load_rewards, punishment

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer, TrainerCallback
    from trl import ModelConfig


logger = logging.getLogger(__name__)

CPU_SECONDS = 9.5e-11
"""For a parameter and a token: a step of SmolLM2-135M with 32 answers of 256 tokens took 105 s."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options: `parse` handles all arguments of the subcommand."""


def run(args: argparse.Namespace) -> int:
    """Train with the subcommand's arguments."""
    train(args.command, *parse(args.command, args.extra_args))
    return 0


def train(
    command: str, script_args: ScriptArguments, training_args: Any, model_args: ModelConfig
) -> Any:
    """Train on the questions, save to `output_dir`, and return the trainer."""
    quiet()
    keep_freed_memory()
    from transformers.utils.logging import disable_progress_bar
    from trl import get_peft_config

    import trl_qurl
    from trl_qurl.lab.evaluation.callback import TaskEvaluationCallback
    from trl_qurl.lab.progress import use_step_lines
    from trl_qurl.lab.update_size import UpdateSizeCallback

    _set_up_logging(training_args)
    # Bars would come between the lines of the steps.
    disable_progress_bar()
    training_args.vllm_engine_kwargs.setdefault("use_tqdm_on_load", False)
    output_dir = training_args.output_dir
    checkpoint = checkpoint_to_resume(training_args.resume_from_checkpoint, output_dir)
    _check_arguments(script_args, training_args, model_args)
    rewards = load_rewards(script_args.reward_funcs or ["accuracy_reward"])
    if script_args.soft_overlong_cache is not None:
        limit = training_args.max_completion_length
        rewards.append(punishment(script_args.soft_overlong_cache, limit))
    callbacks: list[TrainerCallback] = [UpdateSizeCallback()]
    options: dict[str, Any] = {"callbacks": callbacks}
    if command == "ppo":
        options["value_model"] = vars(script_args)["value_model"]
    if script_args.eval_tasks:
        steps = script_args.eval_tasks_steps
        limit = script_args.eval_tasks_limit
        callbacks.append(TaskEvaluationCallback(script_args.eval_tasks, steps, limit))
    loading = {
        "revision": model_args.model_revision,
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
    }
    training_args.model_init_kwargs = loading | (training_args.model_init_kwargs or {})
    questions = _load_questions(script_args)
    logger.info("Loading %s.", model_args.model_name_or_path)
    trainer = getattr(trl_qurl, f"QuRL{command.upper()}Trainer")(
        model=model_args.model_name_or_path,
        reward_funcs=rewards,
        args=training_args,
        train_dataset=questions,
        peft_config=get_peft_config(model_args),
        **options,
    )
    use_step_lines(trainer)
    if training_args.use_cpu:
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        warn_if_slow(parameters, len(questions), training_args)
    learn(trainer, checkpoint)
    trainer.save_model(output_dir)
    saved = f"Policy saved to {output_dir}"
    if script_args.save_quantized:
        saved += f", and its quantized checkpoint to {trainer.save_quantized()}"
    trainer.accelerator.print(f"{saved}\nNext: {name_of_command()} report {output_dir}")
    return trainer


def warn_if_slow(parameters: int, questions: int, args: Any) -> None:
    """Log a warning if a run on a CPU is likely to take days."""
    answers = questions * args.num_generations * args.num_train_epochs
    if args.max_steps > 0:
        per_pass = args.per_device_train_batch_size * args.world_size
        answers = args.max_steps * args.gradient_accumulation_steps * per_pass
    days = CPU_SECONDS * parameters * answers * args.max_completion_length / 86_400
    if days > 1:
        logger.warning(
            "On two CPU cores this run would take about %.0f days, if answers have their full "
            "length: train a smaller model, or lower max_steps, max_completion_length or "
            "steps_per_generation.",
            days,
        )


def _grades(script_args: ScriptArguments) -> bool:
    """Return whether a reward compares with the answers of the data."""
    return not GRADING.isdisjoint(script_args.reward_funcs or GRADING)


def _set_up_logging(training_args: Any) -> None:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")  # only if quiet() did not
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


def _check_arguments(
    script_args: ScriptArguments, training_args: Any, model_args: ModelConfig
) -> None:
    """Raise for what would fail only after the model is loaded, or after training."""
    from transformers import AutoTokenizer
    from transformers.integrations import get_available_reporting_integrations

    if _grades(script_args):
        require("Grading answers", "math_verify", extra="math")
    available = get_available_reporting_integrations()
    missing = {*training_args.report_to}.difference(available, ("azure_ml", "flyte"))  # unlisted
    if missing:
        raise ValueError(
            f"--report_to {' '.join(missing)} is unknown or not installed: install its package, or "
            f"use {', '.join(available)} or none."
        )
    if script_args.save_quantized and training_args.rollout_quantization is None:
        raise ValueError(
            "save_quantized uses the rollout format, but rollout_quantization is None: set it to a "
            "format, or run `trl-qurl quantize` on the saved policy."
        )
    for name in (model_args.model_name_or_path, vars(script_args).get("value_model")):
        if name is not None:
            check_model(name)
    name = model_args.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(name, revision=model_args.model_revision)
    if tokenizer.chat_template is None:
        raise ValueError(
            f"The tokenizer of {name} has no chat template: use the Instruct variant of the model, "
            "or set a chat_template on its tokenizer and save both together."
        )


def _load_questions(script_args: ScriptArguments) -> Dataset:
    """Load the questions, and log how their answers are compared."""
    from trl_qurl.lab.data import describe_solutions, load_questions

    logger.info("Loading the questions of %s.", script_args.dataset)
    is_graded = _grades(script_args)
    questions = load_questions(
        script_args.dataset,
        script_args.dataset_split,
        script_args.dataset_config,
        script_args.dataset_limit,
        script_args.question_column,
        script_args.answer_column,
        needs_answers=is_graded,
        keep_columns=bool(script_args.reward_funcs),
    )
    if is_graded:
        logger.info("%s", describe_solutions(questions["solution"][:]))
    return questions


def checkpoint_to_resume(requested: str | bool | None, output_dir: str) -> Path | None:
    """Return the checkpoint for `resume_from_checkpoint`: a path, or `true` for the latest one in
    `output_dir`.

    `true` without a checkpoint is an error, because starting over would replace the log and policy
    in `output_dir`.
    """
    from trl_qurl.trainers.checks.resuming import complete_checkpoint

    match str(requested).lower():
        case "none" | "false":
            return None
        case "true":
            return complete_checkpoint(True, output_dir)
    return complete_checkpoint(str(requested), output_dir)


def learn(trainer: Trainer, checkpoint: Path | None) -> None:
    """Train; after Ctrl-C, name the latest checkpoint, and after a fault in a reward function its
    place.
    """
    from trl_qurl.lab.progress import live_line

    try:
        with live_line(trainer):
            trainer.train(resume_from_checkpoint=checkpoint)
    except KeyboardInterrupt:
        way = "no checkpoint yet"
        with suppress(ValueError):
            latest = checkpoint_to_resume("true", trainer.args.output_dir)
            way = f"to continue from {latest}, add --resume_from_checkpoint true"
        raise KeyboardInterrupt(way) from None
    except Exception as error:
        files = [getfile(function) for function in trainer.reward_funcs if isfunction(function)]
        frames = [frame for frame in extract_tb(error.__traceback__) if frame.filename in files]
        if not frames:
            raise
        raise ValueError(
            f"A reward function failed in {frames[-1].filename}, line {frames[-1].lineno}: "
            f"{error!r}"
        ) from error
