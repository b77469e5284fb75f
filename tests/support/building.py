"""Builds trainers that must not reach an engine."""

from datasets import Dataset
from tiny import tiny_model, tiny_tokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from support.configs import PLAIN
from trl_qurl import (
    QuRLGRPOConfig,
    QuRLGRPOTrainer,
    QuRLPPOConfig,
    QuRLPPOTrainer,
    QuRLRLOOConfig,
    QuRLRLOOTrainer,
)

KINDS = {
    "GRPO": (QuRLGRPOTrainer, QuRLGRPOConfig),
    "PPO": (QuRLPPOTrainer, QuRLPPOConfig),
    "RLOO": (QuRLRLOOTrainer, QuRLRLOOConfig),
}
"""The trainers and their configs, by algorithm."""

CONFIGS = dict(KINDS.values())
TRLS = {GRPOTrainer: GRPOConfig, RLOOTrainer: RLOOConfig}
SETTINGS = {
    **PLAIN,
    "num_generations": 2,
    "steps_per_generation": 2,
    "max_steps": 1,
    "max_completion_length": 16,
}
PROMPTS = Dataset.from_dict({"prompt": ["ab"] * 16, "solution": ["c"] * 16})
STARTED = "an engine was started"
"""The error of a trainer that passes all checks."""


def start_no_engine(*args, **kwargs):
    raise AssertionError(STARTED)


def reward(completions, **kwargs):
    return [0.0] * len(completions)


def settings_of(cls, directory, **settings):
    return (CONFIGS | TRLS)[cls](str(directory), **SETTINGS | settings)


def build(cls, directory, *, model=None, function=reward, data=PROMPTS, **given):
    """A trainer of a tiny model, unless it is refused."""
    given = {"args": settings_of(cls, directory), "processing_class": tiny_tokenizer()} | given
    if model is None:
        model = tiny_model()
    return cls(model, function, train_dataset=data, **given)
