"""Reinforcement learning of language models with quantized rollouts, as an extension of TRL.

Names are imported when they are first used, so that `import trl_qurl` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"
"""The version, which `setup.cfg` reads as well."""

if TYPE_CHECKING:
    from trl_qurl.cli.noise import quiet
    from trl_qurl.config import QuRLGRPOConfig, QuRLPPOConfig, QuRLRLOOConfig
    from trl_qurl.trainers.callbacks import UpdateAwareQuantizationCallback
    from trl_qurl.trainers.grpo import QuRLGRPOTrainer
    from trl_qurl.trainers.ppo import QuRLPPOTrainer
    from trl_qurl.trainers.rloo import QuRLRLOOTrainer

_HOMES = {
    "QuRLGRPOConfig": "trl_qurl.config",
    "QuRLGRPOTrainer": "trl_qurl.trainers.grpo",
    "QuRLPPOConfig": "trl_qurl.config",
    "QuRLPPOTrainer": "trl_qurl.trainers.ppo",
    "QuRLRLOOConfig": "trl_qurl.config",
    "QuRLRLOOTrainer": "trl_qurl.trainers.rloo",
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
    "UpdateAwareQuantizationCallback",
    "__version__",
    "quiet",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
