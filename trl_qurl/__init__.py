"""Reinforcement learning for language models with quantized rollouts, built on TRL.

Names are imported on first use, so `import trl_qurl` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"
"""Package version, also read by `setup.cfg`."""

if TYPE_CHECKING:
    from trl_qurl.cli.noise import quiet
    from trl_qurl.config import QuRLGRPOConfig, QuRLPPOConfig, QuRLRLOOConfig
    from trl_qurl.trainers.callbacks import RolloutCallback, UpdateAwareQuantizationCallback
    from trl_qurl.trainers.grpo import QuRLGRPOTrainer
    from trl_qurl.trainers.ppo import QuRLPPOTrainer
    from trl_qurl.trainers.rloo import QuRLRLOOTrainer

_LAZY_IMPORTS = {
    "QuRLGRPOConfig": "trl_qurl.config",
    "QuRLGRPOTrainer": "trl_qurl.trainers.grpo",
    "QuRLPPOConfig": "trl_qurl.config",
    "QuRLPPOTrainer": "trl_qurl.trainers.ppo",
    "QuRLRLOOConfig": "trl_qurl.config",
    "QuRLRLOOTrainer": "trl_qurl.trainers.rloo",
    "RolloutCallback": "trl_qurl.trainers.callbacks",
    "UpdateAwareQuantizationCallback": "trl_qurl.trainers.callbacks",
    "quiet": "trl_qurl.cli.noise",
}

__all__ = [
    "QuRLGRPOConfig",
    "QuRLGRPOTrainer",
    "QuRLPPOConfig",
    "QuRLPPOTrainer",
    "QuRLRLOOConfig",
    "QuRLRLOOTrainer",
    "RolloutCallback",
    "UpdateAwareQuantizationCallback",
    "__version__",
    "quiet",
]


def __getattr__(name: str) -> object:
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY_IMPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
