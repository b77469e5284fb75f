"""GRPO with quantized rollouts on questions with checkable answers: `examples/gsm8k_grpo.py`, `trl-qurl grpo`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trl_qurl.lab.recipes import questions
from trl_qurl.lab.recipes.questions import ScriptArguments

if TYPE_CHECKING:
    from trl import ModelConfig

    from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer

DEFAULTS: dict[str, Any] = {
    **questions.DEFAULTS,
    "output_dir": "qurl-gsm8k",
    "num_generations": 8,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 20,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options: all arguments of `trl-qurl grpo` go to `parse_arguments`, which knows the settings."""


def run(args: argparse.Namespace) -> int:
    """Train."""
    train(*parse_arguments(args.further))
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[ScriptArguments, QuRLGRPOConfig, ModelConfig]:
    """Read arguments from a command line and from the YAML files that `--config` names."""
    from trl_qurl import QuRLGRPOConfig

    return questions.parse_arguments("grpo", argv, ScriptArguments, QuRLGRPOConfig, DEFAULTS)


def train(script_args: ScriptArguments, training_args: QuRLGRPOConfig, model_args: ModelConfig) -> QuRLGRPOTrainer:
    """Train on the questions with the answers as the reward, and save the full-precision policy to `output_dir`."""
    from trl_qurl import QuRLGRPOTrainer

    return questions.train(QuRLGRPOTrainer, script_args, training_args, model_args)
