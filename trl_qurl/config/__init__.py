"""Trainer configurations: TRL's, plus the settings of quantized rollouts and the critic."""

from trl_qurl.config.checks.conflicts import CLIPPED_LOSS_TYPES
from trl_qurl.config.checks.engine_arguments import TAKEN_ENGINE_ARGUMENTS
from trl_qurl.config.grpo import QuRLGRPOConfig
from trl_qurl.config.ppo import QuRLPPOConfig
from trl_qurl.config.rloo import QuRLRLOOConfig
from trl_qurl.config.rollout import QuantizedRolloutsConfig

__all__ = [
    "CLIPPED_LOSS_TYPES",
    "TAKEN_ENGINE_ARGUMENTS",
    "QuRLGRPOConfig",
    "QuRLPPOConfig",
    "QuRLRLOOConfig",
    "QuantizedRolloutsConfig",
]
