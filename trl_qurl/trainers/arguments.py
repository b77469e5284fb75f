"""A trainer's config, and the settings of rollouts made from it."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from transformers import TrainingArguments
from trl.import_utils import is_vllm_available

from trl_qurl.quantization.formats import gpu_capability
from trl_qurl.rollout.checks.hardware import WORTH_COMPILING
from trl_qurl.rollout.preparation import RolloutSettings

Constructor = TypeVar("Constructor", bound=Callable[..., None])


def takes(parent: Constructor) -> Callable[[Any], Constructor]:
    """Return a decorator of a constructor that passes what it is given on to `parent`.

    `help` and editors then show the arguments of `parent`, and what the constructor adds.
    """

    def with_signature(constructor: Any) -> Constructor:
        theirs = inspect.signature(parent)
        ours = inspect.signature(constructor).parameters.values()
        added = [argument for argument in ours if argument.kind is argument.KEYWORD_ONLY]
        constructor.__signature__ = theirs.replace(parameters=[*theirs.parameters.values(), *added])
        return constructor

    return with_signature


def checked_config(trainer: Any, config: TrainingArguments | None) -> Any:
    """Return a config of this trainer class; the default one if `config` is `None`."""
    if not is_vllm_available():
        raise ImportError(
            "Quantized rollouts need vLLM, which is not installed: run `pip install "
            "'trl-qurl[vllm]'` (TRL imports it here even if a server generates), or train with "
            "TRL's own trainer and use_vllm=False."
        )
    config_class = trainer._config_class
    if config is None:
        return config_class()
    if isinstance(config, config_class):
        return config
    raise TypeError(
        f"args is a {type(config).__name__}, which lacks settings of {trainer.__name__}: pass a "
        f"{config_class.__name__} (it takes the same fields and adds its own)."
    )


def rollout_settings(args: TrainingArguments, listed: int = 0) -> RolloutSettings:
    """Return the rollout settings of a config as flat values.

    `listed` is how many of the likeliest tokens the engine returns per position.
    """
    names = [field.name for field in fields(RolloutSettings) if field.name != "listed"]
    settings = {name: getattr(args, name) for name in names}
    answers = args.max_steps * args.gradient_accumulation_steps * args.per_device_train_batch_size
    tokens = answers * (args.max_completion_length or 0)  # not above 0 if nobody knows
    if 0 < tokens < WORTH_COMPILING and gpu_capability() is None:
        # A short run on a CPU ends before compiling pays.
        settings["vllm_engine_kwargs"] = {"enforce_eager": True} | args.vllm_engine_kwargs
    return RolloutSettings(**settings, listed=listed)
