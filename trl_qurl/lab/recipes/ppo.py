"""PPO with quantized rollouts on questions with checkable answers: `examples/gsm8k_ppo.py`, `trl-qurl ppo`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trl_qurl.cli.options import check_model
from trl_qurl.lab.recipes import questions

if TYPE_CHECKING:
    from trl import ModelConfig

    from trl_qurl import QuRLPPOConfig, QuRLPPOTrainer

# The paper's GSM8K run: 256 prompts with one answer of up to 512 tokens each, learning rate 1e-5, 15 epochs = 435
# rollouts, UAQ off. The number of updates per rollout is not given; verl's example of this run makes four of 64.
DEFAULTS: dict[str, Any] = {
    **questions.DEFAULTS,
    "output_dir": "qurl-gsm8k-ppo",
    "num_generations": 1,
    "max_steps": 4 * 435,
    "lr_scheduler_type": "constant",
    "critic_learning_rate": 1e-5,
}


@dataclass
class ScriptArguments(questions.ScriptArguments):
    """The questions to train on, and where the critic starts."""

    value_model: str | None = questions.option(None, "Model that the critic starts from. By default the policy's.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options: all arguments of `trl-qurl ppo` go to `parse_arguments`, which knows the settings."""


def run(args: argparse.Namespace) -> int:
    """Train."""
    train(*parse_arguments(args.further))
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[ScriptArguments, QuRLPPOConfig, ModelConfig]:
    """Read arguments from a command line and from the YAML files that `--config` names."""
    from trl_qurl import QuRLPPOConfig

    return questions.parse_arguments("ppo", argv, ScriptArguments, QuRLPPOConfig, DEFAULTS)


def train(script_args: ScriptArguments, training_args: QuRLPPOConfig, model_args: ModelConfig) -> QuRLPPOTrainer:
    """Train on the questions with the answers as the reward, and save the full-precision policy and its critic."""
    from trl_qurl import QuRLPPOTrainer

    if script_args.value_model is not None:
        check_model(script_args.value_model)
    return questions.train(QuRLPPOTrainer, script_args, training_args, model_args, value_model=script_args.value_model)
