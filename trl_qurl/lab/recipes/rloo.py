"""RLOO with quantized rollouts on questions with checkable answers: `trl-qurl rloo`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trl_qurl.lab.recipes import questions
from trl_qurl.lab.recipes.questions import ScriptArguments

if TYPE_CHECKING:
    from trl import ModelConfig

    from trl_qurl import QuRLRLOOConfig, QuRLRLOOTrainer

# One update per rollout, as in REINFORCE: the ratio of an answer of hundreds of tokens soon leaves the clip range.
DEFAULTS: dict[str, Any] = {
    **questions.DEFAULTS,
    "output_dir": "qurl-gsm8k-rloo",
    "num_generations": 8,
    "gradient_accumulation_steps": 16,
    "logging_steps": 1,
    "save_steps": 25,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options: all arguments of `trl-qurl rloo` go to `parse_arguments`, which knows the settings."""


def run(args: argparse.Namespace) -> int:
    """Train."""
    train(*parse_arguments(args.further))
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[ScriptArguments, QuRLRLOOConfig, ModelConfig]:
    """Read arguments from a command line and from the YAML files that `--config` names."""
    from trl_qurl import QuRLRLOOConfig

    return questions.parse_arguments("rloo", argv, ScriptArguments, QuRLRLOOConfig, DEFAULTS)


def train(script_args: ScriptArguments, training_args: QuRLRLOOConfig, model_args: ModelConfig) -> QuRLRLOOTrainer:
    """Train on the questions with the answers as the reward, and save the full-precision policy to `output_dir`."""
    from trl_qurl import QuRLRLOOTrainer

    return questions.train(QuRLRLOOTrainer, script_args, training_args, model_args)
