"""Training on questions with checkable answers: arguments and the run itself, whatever the algorithm.

Arguments are TRL's, from the command line or a YAML file; a recipe adds its defaults.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from trl_qurl.cli.noise import quiet
from trl_qurl.lab.recipes.arguments import check_chat_template, check_model, take_settings

if TYPE_CHECKING:
    from trl import ModelConfig

    from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer

logger = logging.getLogger(__name__)


@dataclass
class ScriptArguments:
    """The questions to train on."""

    dataset: str = field(
        default="openai/gsm8k",
        metadata={"help": "Name on the Hub, or a local .json or .jsonl file (or .gz), of questions and answers."},
    )
    dataset_config: str = field(default="main", metadata={"help": "Configuration of a Hub data set."})
    dataset_split: str = field(default="train", metadata={"help": "Split of a Hub data set."})
    dataset_limit: int | None = field(default=None, metadata={"help": "Train on the first so many questions only."})
    question_column: str | None = field(default=None, metadata={"help": "Default: `question` or `problem`."})
    answer_column: str | None = field(default=None, metadata={"help": "Default: `answer` or `final_answer`."})
    soft_overlong_cache: int | None = field(
        default=None,
        metadata={
            "help": "Tokens before max_completion_length over which a completion's reward falls by up to 1 (DAPO)."
        },
    )
    save_quantized: bool = field(
        default=False,
        metadata={"help": "Also write the policy's 8-bit checkpoint, for `vllm serve`, to OUTPUT_DIR-int8 or -fp8."},
    )


def parse_arguments(
    command: str,
    argv: Sequence[str] | None,
    script_arguments: type[ScriptArguments],
    config: type[QuRLGRPOConfig],
    defaults: dict[str, Any],
) -> tuple[Any, Any, ModelConfig]:
    """Read arguments from a command line and from the YAML files that `--config` names.

    Args:
        command: `trl-qurl`'s name of the recipe, for messages.
        argv: the arguments; `None` for those of this process.
        script_arguments: what the recipe adds.
        config: of the trainer.
        defaults: what the recipe changes of the defaults; the YAML files override it, and `argv` overrides all.

    Returns:
        The script's arguments, the trainer's and the model's.

    Raises:
        FileNotFoundError: a YAML file does not exist.
        ValueError: it is not one, it holds unknown names, or settings do not fit together.
    """
    quiet()
    from trl import ModelConfig, TrlParser

    prog = None if argv is None else f"trl-qurl {command}"
    argv = sys.argv[1:] if argv is None else list(argv)
    groups = [script_arguments, config, ModelConfig]
    known_names = {setting.name for group in groups for setting in fields(group)}
    settings, argv = take_settings(argv, known_names, command)
    os.environ.update({name: str(value) for name, value in settings.pop("env", {}).items()})
    # Three hundred options are no answer to a typing error: `--help` lists them below this line.
    parser = TrlParser(groups, prog=prog, usage="%(prog)s [--config FILE ...] [--OPTION VALUE ...]")
    parser.set_defaults_with_config(**{**defaults, **settings})
    script_args, training_args, model_args, unknown = parser.parse_args_and_config(argv, return_remaining_strings=True)
    if unknown:
        raise ValueError(describe_unknown(unknown, known_names, command))
    return script_args, training_args, model_args


def describe_unknown(unknown: Sequence[str], known_names: Collection[str], command: str) -> str:
    """What to tell someone who gave options that do not exist, with the names that are spelled most alike."""
    options = [word.split("=")[0] for word in unknown if word.startswith("--")]
    near = [get_close_matches(option[2:], known_names, 1) for option in options]
    guesses = [f"--{name}" for names in near for name in names]
    return (
        f"There is no option {' '.join(options or unknown)}"
        f"{'; did you mean ' + ' '.join(guesses) + '?' if guesses else '.'} `trl-qurl {command} --help` lists all."
    )


def train(
    trainer_class: type[QuRLGRPOTrainer],
    script_args: ScriptArguments,
    training_args: QuRLGRPOConfig,
    model_args: ModelConfig,
    **further: Any,
) -> QuRLGRPOTrainer:
    """Train on the questions, with the answers as the reward, and save to `output_dir`; `further` is the trainer's."""
    quiet()
    from tqdm.contrib.logging import logging_redirect_tqdm
    from trl import get_peft_config

    from trl_qurl.lab.data import load_questions
    from trl_qurl.rewards import answer_reward
    from trl_qurl.trainers.progress import use_step_lines

    is_first = training_args.process_index == 0
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    # What takes its time, and how weights travel and why that way; said once.
    logging.getLogger("trl_qurl").setLevel(logging.INFO if is_first else logging.WARNING)
    if script_args.save_quantized and training_args.rollout_quantization is None:
        raise ValueError(
            "save_quantized writes the format of the rollouts, and rollout_quantization is None: set it to 'int8' or "
            "'fp8', or use `trl-qurl quantize` on the saved policy."
        )
    # First of all, because a wrong name should not cost the time it takes to start an engine.
    check_model(model_args.model_name_or_path)
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
    trainer = trainer_class(
        model=model_args.model_name_or_path,
        reward_funcs=[answer_reward, *punishments(script_args.soft_overlong_cache, training_args)],
        args=training_args,
        train_dataset=questions,
        peft_config=get_peft_config(model_args),
        **further,
    )
    use_step_lines(trainer)
    if training_args.resume_from_checkpoint:
        logger.info("Resuming from %s.", training_args.resume_from_checkpoint)
    with logging_redirect_tqdm():  # a message goes above the bar
        trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    logger.info("Saving to %s.", training_args.output_dir)
    trainer.save_model(training_args.output_dir)
    if script_args.save_quantized:
        trainer.accelerator.print(f"8-bit checkpoint saved to {trainer.save_quantized()}")
    return trainer


def punishments(soft_overlong_cache: int | None, training_args: QuRLGRPOConfig) -> list[Any]:
    """TRL's soft punishment of completions that come close to the limit of tokens, if it is asked for.

    Raises:
        ValueError: it would punish completions of any length.
    """
    from trl.rewards import get_soft_overlong_punishment

    if soft_overlong_cache is None:
        return []
    longest = training_args.max_completion_length
    if longest is None or not 0 < soft_overlong_cache < longest:
        raise ValueError(
            f"soft_overlong_cache={soft_overlong_cache} must lie between 0 and max_completion_length={longest}: it is "
            "the number of tokens before that limit from which on a completion is punished."
        )
    return [get_soft_overlong_punishment(longest, soft_overlong_cache)]
