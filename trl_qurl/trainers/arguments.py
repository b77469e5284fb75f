"""A trainer's config, and the settings of rollouts made from it."""

from dataclasses import fields
from typing import Any

from transformers import TrainingArguments
from trl.import_utils import is_vllm_available

from trl_qurl.quantization.formats import gpu_capability
from trl_qurl.rollout.checks.hardware import WORTH_COMPILING
from trl_qurl.rollout.preparation import RolloutSettings


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
    given = type(config)
    if given in config_class.__mro__ and given.__module__.startswith("trl."):  # as GRPOConfig
        settings = {
            field.name: getattr(config, field.name) for field in fields(config) if field.init
        }
        # TRL has derived it from steps_per_generation, and rejects a config with both.
        settings.pop("generation_batch_size", None)
        settings["use_vllm"] = True
        return config_class(**settings)
    raise TypeError(
        f"args is a {given.__name__}, which lacks settings of {trainer.__name__}: pass a "
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
