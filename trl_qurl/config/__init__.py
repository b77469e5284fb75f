"""Trainer configurations: TRL's, plus the settings of quantized rollouts and the critic."""

from trl_qurl.config.grpo import QuRLGRPOConfig
from trl_qurl.config.ppo import QuRLPPOConfig
from trl_qurl.config.refusals import CLIPPED_LOSS_TYPES, TAKEN_ENGINE_ARGUMENTS
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
