"""Reinforcement learning for language models with quantized rollouts, built on TRL.

Names are imported on first use, so `import trl_qurl` costs nothing.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"
"""Package version, also read by `setup.cfg`."""

# TRL 1.16 supports vLLM up to 0.31, and warns a dozen times. Our extra installs 0.32, with which we
# test (requirements/versions.toml). Appended: after the user's PYTHONWARNINGS and -W.
warnings.filterwarnings(
    "ignore", r"TRL currently supports vLLM versions .* You have version 0\.32\.", append=True
)

if TYPE_CHECKING:
    from trl_qurl.cli.noise import quiet
    from trl_qurl.config.grpo import QuRLGRPOConfig
    from trl_qurl.config.ppo import QuRLPPOConfig
    from trl_qurl.config.rloo import QuRLRLOOConfig
    from trl_qurl.trainers.callbacks import RolloutCallback, UpdateAwareQuantizationCallback
    from trl_qurl.trainers.grpo import QuRLGRPOTrainer
    from trl_qurl.trainers.ppo import QuRLPPOTrainer
    from trl_qurl.trainers.rloo import QuRLRLOOTrainer

_LAZY_IMPORTS = {
    "QuRLGRPOConfig": "trl_qurl.config.grpo",
    "QuRLGRPOTrainer": "trl_qurl.trainers.grpo",
    "QuRLPPOConfig": "trl_qurl.config.ppo",
    "QuRLPPOTrainer": "trl_qurl.trainers.ppo",
    "QuRLRLOOConfig": "trl_qurl.config.rloo",
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
