"""Configuration of the trainers: TRL's, plus what quantized rollouts and the critic add."""

from trl_qurl.config.grpo import CLIPPED_LOSS_TYPES, DynamicSamplingSettings, QuRLGRPOConfig
from trl_qurl.config.ppo import QuRLPPOConfig
from trl_qurl.config.rloo import QuRLRLOOConfig
from trl_qurl.config.rollout import TAKEN_ENGINE_ARGUMENTS, QuantizedRolloutsConfig

__all__ = [
    "CLIPPED_LOSS_TYPES",
    "TAKEN_ENGINE_ARGUMENTS",
    "DynamicSamplingSettings",
    "QuRLGRPOConfig",
    "QuRLPPOConfig",
    "QuRLRLOOConfig",
    "QuantizedRolloutsConfig",
]
