"""Training on questions with checkable answers, with any trainer of this project: the arguments and the run.

The arguments are TRL's, from the command line or YAML files; each recipe adds its defaults.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
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

    from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer

logger = logging.getLogger(__name__)


@dataclass
class ScriptArguments:
    """The questions to train on."""

    dataset: str = field(
        default="openai/gsm8k",
        metadata={"help": "Questions and answers: a name on the Hub, or a local .json or .jsonl file (or .gz)."},
    )
    dataset_config: str = field(default="main", metadata={"help": "Configuration of a dataset on the Hub."})
    dataset_split: str = field(default="train", metadata={"help": "Split of a dataset on the Hub."})
    dataset_limit: int | None = field(default=None, metadata={"help": "Train on the first N questions only."})
    question_column: str | None = field(
        default=None, metadata={"help": "Column of the questions. By default `question` or `problem`."}
    )
    answer_column: str | None = field(
        default=None, metadata={"help": "Column of the answers. By default `answer` or `final_answer`."}
    )
    soft_overlong_cache: int | None = field(
        default=None,
        metadata={
            "help": "Soft overlong punishment (DAPO): the reward falls by up to 1 over the last N tokens before "
            "max_completion_length."
        },
    )
    save_quantized: bool = field(
        default=False,
        metadata={"help": "Also write the policy's quantized checkpoint, for `vllm serve`, to OUTPUT_DIR-FORMAT."},
    )
    eval_tasks: list[str] = field(
        default_factory=list, metadata={"help": "Benchmarks to answer during training: names, files or name=source."}
    )
    eval_tasks_steps: int = field(default=100, metadata={"help": "Optimizer steps between these evaluations."})
    eval_tasks_limit: int | None = field(
        default=None, metadata={"help": "Only the first N questions of each benchmark."}
    )
    eval_tasks_by: str = field(
        default="actor", metadata={"help": "Who answers: 'actor' (the engine, fast) or 'policy' (exact, slow)."}
    )


def parse_arguments(
    command: str,
    argv: Sequence[str] | None,
    script_arguments: type[ScriptArguments],
    config: type[QuRLGRPOConfig],
    defaults: dict[str, Any],
) -> tuple[Any, Any, ModelConfig]:
    """Read arguments from a command line and from the YAML files that `--config` names.

    Raises:
        FileNotFoundError: If a YAML file does not exist.
        ValueError: If an option or a setting does not exist, or if settings do not fit together.
    """
    quiet()
    from trl import ModelConfig, TrlParser

    class Parser(SuggestingParser, TrlParser):
        """TRL's parser, which suggests what a misspelled value was meant to be."""

    prog = None if argv is None else f"trl-qurl {command}"
    argv = sys.argv[1:] if argv is None else list(argv)
    groups = [script_arguments, config, ModelConfig]
    known_names = {setting.name for group in groups for setting in fields(group)}
    # argparse would print all three hundred options above a message about one of them.
    usage = "%(prog)s [--config FILE ...] [--OPTION VALUE ...]"
    parser = Parser(groups, prog=prog, usage=usage, add_help=False)  # type: ignore[arg-type, misc]
    if "--help-all" in argv:
        parser.print_help()
        parser.exit()
    if "--help" in argv or "-h" in argv:
        print_help(parser.prog, script_arguments, config, defaults, further=len(known_names))
        parser.exit()
    settings, argv = take_settings(argv, known_names, command)
    os.environ.update({name: str(value) for name, value in settings.pop("env", {}).items()})
    parser.set_defaults_with_config(**{**cpu_settings(), **defaults, **settings})
    _, unknown = parser.parse_known_args(argv)  # before the settings are checked: a typing error comes first
    if unknown:
        raise ValueError(describe_unknown(unknown, sorted(known_names), command))
    return parser.parse_args_and_config(argv)


def describe_unknown(unknown: Sequence[str], known_names: Sequence[str], command: str) -> str:
    """The message for options that do not exist, with the names that are spelled most alike."""
    options = [word.split("=")[0] for word in unknown if word.startswith("--")]
    if not options:
        return f"Unexpected argument {' '.join(unknown)}: write settings as --NAME VALUE."
    names = [f"--{name}" for name in known_names]
    guess = did_you_mean([option.replace("-", "_").replace("__", "--", 1) for option in options], names)
    return f"There is no option {' '.join(options)}{guess} `trl-qurl {command} --help` lists ours, --help-all all."


def train(
    trainer_class: type[QuRLGRPOTrainer],
    script_args: ScriptArguments,
    training_args: QuRLGRPOConfig,
    model_args: ModelConfig,
    **further: Any,
) -> QuRLGRPOTrainer:
    """Train on the questions, with the answers as the reward, and save to `output_dir`.

    Raises:
        ValueError: If settings do not fit together, or if the model has no chat template.
        FileNotFoundError: If the model or the questions do not exist.
    """
    quiet()
    keep_freed_memory()
    from tqdm.contrib.logging import logging_redirect_tqdm
    from trl import get_peft_config

    from trl_qurl.lab.data import load_questions
    from trl_qurl.lab.progress import use_step_lines
    from trl_qurl.rewards import answer_reward

    is_first = training_args.process_index == 0
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    # Slow steps, and the way that weights reach the engine, are logged once.
    logging.getLogger("trl_qurl").setLevel(logging.INFO if is_first else logging.WARNING)
    if training_args.use_cpu and cpu_settings():
        precision = "bfloat16 autocast" if training_args.bf16 else "float32"
        logger.info("No accelerator found: training on the CPU, in %s (use_cpu, bf16).", precision)
    if script_args.save_quantized and training_args.rollout_quantization is None:
        raise ValueError(
            "save_quantized writes the format of the rollouts, but rollout_quantization is None: set it to a "
            "format, or use `trl-qurl quantize` on the saved policy."
        )
    # Checked first, so that a wrong name is reported before an engine is started.
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
        callbacks=evaluations(script_args),
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
        trainer.accelerator.print(f"Quantized checkpoint saved to {trainer.save_quantized()}")
    return trainer


def evaluations(script_args: ScriptArguments) -> list[Any]:
    """The callback that answers benchmarks during training, if any are named."""
    from trl_qurl.lab.evaluation.callback import TaskEvaluationCallback

    if not script_args.eval_tasks:
        return []
    settings = (script_args.eval_tasks_steps, script_args.eval_tasks_limit, script_args.eval_tasks_by)
    return [TaskEvaluationCallback(script_args.eval_tasks, *settings)]


def punishments(soft_overlong_cache: int | None, training_args: QuRLGRPOConfig) -> list[Any]:
    """TRL's soft overlong punishment, if it is asked for.

    Raises:
        ValueError: If completions of every length would be punished.
    """
    from trl.rewards import get_soft_overlong_punishment

    if soft_overlong_cache is None:
        return []
    longest = training_args.max_completion_length
    if longest is None or not 0 < soft_overlong_cache < longest:
        raise ValueError(
            f"soft_overlong_cache={soft_overlong_cache} must be between 0 and max_completion_length={longest}: it is "
            "the number of tokens before that limit over which the punishment grows."
        )
    return [get_soft_overlong_punishment(longest, soft_overlong_cache)]


def check_chat_template(name_or_path: str, revision: str | None = None) -> None:
    """Refuse a model without a chat template, since the recipes ask their questions in a conversation.

    Raises:
        ValueError: If its tokenizer has no chat template.
    """
    from transformers import AutoTokenizer

    if AutoTokenizer.from_pretrained(name_or_path, revision=revision).chat_template is None:
        raise ValueError(
            f"The tokenizer of {name_or_path} has no chat template, but questions are asked in a conversation: use "
            "the Instruct variant of the model, or set a chat_template on its tokenizer and save both together."
        )
