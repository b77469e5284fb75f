"""GRPO with quantized rollouts on questions with checkable answers: arguments, defaults and the run itself.

`examples/gsm8k_grpo.py` and `trl-qurl grpo` are this run. Arguments are TRL's, from the command line or a YAML file.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from trl_qurl.recipes.arguments import check_model, check_settings_file

if TYPE_CHECKING:
    from trl import ModelConfig

    from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer

# What this run changes of the defaults; a YAML file overrides it, and the command line overrides both.
DEFAULTS: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "output_dir": "qurl-gsm8k",
    # A rollout of 256 completions makes four updates of 64: with a single one the clip bounds would never be reached.
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "steps_per_generation": 16,
    "num_generations": 8,
    "max_completion_length": 512,
    # The paper's GSM8K run: learning rate 1e-5, at which it leaves update-aware quantization off.
    "learning_rate": 1e-5,
    "uaq_scale": 1.0,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 20,
    "logging_steps": 4,
    "save_steps": 100,
}


@dataclass
class ScriptArguments:
    """The questions to train on."""

    dataset: str = field(
        default="openai/gsm8k",
        metadata={"help": "Name on the Hub, or a local .json or .jsonl file (or .gz), with `question` and `answer`."},
    )
    dataset_config: str = field(default="main", metadata={"help": "Configuration of a Hub data set."})
    dataset_split: str = field(default="train", metadata={"help": "Split of a Hub data set."})
    dataset_limit: int | None = field(default=None, metadata={"help": "Train on the first so many questions only."})


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[ScriptArguments, QuRLGRPOConfig, ModelConfig]:
    """Read arguments from `argv` (default: the command line) and from the YAML file that `--config` names."""
    from trl import ModelConfig, TrlParser

    from trl_qurl import QuRLGRPOConfig

    argv = sys.argv[1:] if argv is None else list(argv)
    groups = [ScriptArguments, QuRLGRPOConfig, ModelConfig]
    check_settings_file(argv, known_names={setting.name for group in groups for setting in fields(group)})
    parser = TrlParser(groups)
    parser.set_defaults_with_config(**DEFAULTS)
    return parser.parse_args_and_config(argv)


def train(script_args: ScriptArguments, training_args: QuRLGRPOConfig, model_args: ModelConfig) -> QuRLGRPOTrainer:
    """Train on the questions, with the answers as the reward, and save the full-precision policy to `output_dir`."""
    from trl import get_peft_config

    from trl_qurl import QuRLGRPOTrainer
    from trl_qurl.data import load_questions
    from trl_qurl.rewards import answer_reward

    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("trl_qurl").setLevel(logging.INFO)  # how weights travel, and why that way
    # First of all, because a wrong name should not cost the time it takes to start an engine.
    check_model(model_args.model_name_or_path)
    questions = load_questions(
        script_args.dataset, script_args.dataset_split, script_args.dataset_config, script_args.dataset_limit
    )
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    trainer = QuRLGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=answer_reward,
        args=training_args,
        train_dataset=questions,
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    return trainer
