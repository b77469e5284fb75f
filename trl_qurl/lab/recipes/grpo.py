"""GRPO with quantized rollouts on questions with checkable answers: `examples/gsm8k_grpo.py`, `trl-qurl grpo`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trl_qurl.lab.recipes import questions

if TYPE_CHECKING:
    from trl import ModelConfig

    from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer

# Defaults that this run changes.
DEFAULTS: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "output_dir": "qurl-gsm8k",
    # A rollout of 256 completions makes four updates of 64; with a single update no clip bound would ever act.
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "steps_per_generation": 16,
    "num_generations": 8,
    "max_completion_length": 512,
    # The paper's GSM8K run uses a learning rate of 1e-5, at which it turns update-aware quantization off.
    "learning_rate": 1e-5,
    "uaq_scale": 1.0,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 20,
    "logging_steps": 4,
    "save_steps": 100,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options: all arguments of `trl-qurl grpo` go to `parse_arguments`, which knows the settings."""


def run(args: argparse.Namespace) -> int:
    """Train."""
    trainer = train(*parse_arguments(args.further))
    trainer.accelerator.print(f"Policy saved to {trainer.args.output_dir}")
    return 0


def parse_arguments(
    argv: Sequence[str] | None = None,
) -> tuple[questions.ScriptArguments, QuRLGRPOConfig, ModelConfig]:
    """Read arguments from a command line and from the YAML files that `--config` names."""
    from trl_qurl import QuRLGRPOConfig

    return questions.parse_arguments("grpo", argv, questions.ScriptArguments, QuRLGRPOConfig, DEFAULTS)


def train(
    script_args: questions.ScriptArguments, training_args: QuRLGRPOConfig, model_args: ModelConfig
) -> QuRLGRPOTrainer:
    """Train on the questions with the answers as the reward, and save the full-precision policy to `output_dir`."""
    from trl_qurl import QuRLGRPOTrainer

    return questions.train(QuRLGRPOTrainer, script_args, training_args, model_args)
