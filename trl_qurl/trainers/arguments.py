"""A trainer's arguments, checked before an engine starts.

TRL would report most of these errors minutes later.
"""

import dataclasses
import inspect
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from datasets import Dataset
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments
from transformers.utils.quantization_config import QuantizationConfigMixin
from trl.import_utils import is_vllm_available

from trl_qurl.paths import check_model_directory, is_local
from trl_qurl.quantization.formats import gpu_capability
from trl_qurl.rollout.checks.hardware import WORTH_COMPILING
from trl_qurl.rollout.preparation import RolloutSettings

# TRL passes these to every reward function by name, before the dataset's columns.
REWARD_KEYWORDS = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
)
KEPT = ("prompt", "image", "images")  # columns that remove_unused_columns=True leaves
NOT_PASSED = ("prompt", "completion", "completion_ids")  # columns that TRL does not pass
# PEFT's methods that merge exactly.
MERGED = "BOFT C3A DELORA FOURIERFT GRALORA HRA IA3 LOHA LOKR LORA MISS OFT PSOFT SHIRA WAVEFT"
# Settings that limit an adapter to some tokens, so it cannot be merged.
ONLY_TOKENS = ("alora_invocation_tokens", "trainable_token_indices")


def checked_config(
    trainer: Any, config: TrainingArguments | None, model: PreTrainedModel | str
) -> Any:
    """Return a config of this trainer class; the default one if `config` is `None`."""
    if not is_vllm_available():
        raise ImportError(
            "Quantized rollouts need vLLM, which is not installed: run `pip install "
            "'trl-qurl[vllm]'` (TRL imports it here even if a server generates), or train with "
            "TRL's own trainer and use_vllm=False."
        )
    config_class = trainer._config_class
    if config is None:
        path = model if isinstance(model, str) else model.config._name_or_path
        name = path.split("/")[-1] or "model"
        return config_class(f"{name}-QuRL-{trainer._algorithm}")
    if isinstance(config, config_class):
        return config
    given = type(config)
    if given in config_class.__mro__ and given.__module__.startswith("trl."):  # as GRPOConfig
        settings = {
            field.name: getattr(config, field.name)
            for field in dataclasses.fields(config)
            if field.init
        }
        # TRL has derived it from steps_per_generation, and rejects a config with both.
        settings.pop("generation_batch_size", None)
        settings["use_vllm"] = True
        return config_class(**settings)
    package = config_class.__module__.partition(".")[0]
    raise TypeError(
        f"args is a {given.__name__}, which lacks settings of {trainer.__name__}: pass a "
        f"{package}.{config_class.__name__} (it takes the same fields and adds its own)."
    )


def rollout_settings(args: TrainingArguments, listed: int = 0) -> RolloutSettings:
    """Return the rollout settings of a config as flat values.

    `listed` is how many of the likeliest tokens the engine returns per position.
    """
    answers = args.max_steps * args.gradient_accumulation_steps * args.per_device_train_batch_size
    tokens = answers * (args.max_completion_length or 0)  # not above 0 if nobody knows
    engine_kwargs = args.engine_kwargs
    if 0 < tokens < WORTH_COMPILING and gpu_capability() is None:
        # A short run on a CPU ends before compiling pays.
        engine_kwargs = {"enforce_eager": True} | engine_kwargs
    return RolloutSettings(
        formats=args.rollout_quantization,
        ignore=tuple(args.quantization_ignore),
        is_served=args.vllm_mode == "server",
        weight_sync=args.weight_sync,
        round_base=args.round_base,
        smooths=args.smooths,
        checkpoint_dir=args.rollout_checkpoint_dir,
        engine_kwargs=engine_kwargs,
        seed=args.seed,
        sync_check_interval=args.sync_check_interval,
        request_timeout=args.vllm_request_timeout,
        listed=listed,
    )


def applies_uaq(args: TrainingArguments, arguments: Mapping[str, Any]) -> bool:
    """Return whether to rescale the model for UAQ; warn if an adapter forbids it."""
    if args.uaq_scale == 1.0:
        return False
    model = arguments["model"]
    has_adapter = not isinstance(model, str) and is_peft_model(model)
    if not has_adapter and arguments.get("peft_config") is None:
        return True
    warnings.warn(
        f"uaq_scale={args.uaq_scale} is not applied: an adapter trained on rescaled weights would "
        "not fit the original model. Set uaq_scale=1.0 to avoid this warning.",
        stacklevel=3,
    )
    return False


def check_arguments(args: TrainingArguments, arguments: Mapping[str, Any]) -> None:
    """Raise for datasets and reward functions that training cannot use.

    `arguments` are the constructor's, by TRL's names; `args` is the config among them.
    """
    if arguments.get("environment_factory") is None:  # an environment brings its own prompts
        evaluation = arguments.get("eval_dataset")
        check_columns("train_dataset", arguments.get("train_dataset"))
        if isinstance(evaluation, dict):
            for name, dataset in evaluation.items():
                check_columns(name, dataset)
        else:
            check_columns("eval_dataset", evaluation)
    train: Any = arguments.get("train_dataset")
    needed = args.generation_batch_size // args.num_generations
    if hasattr(train, "__len__") and len(train) < needed:  # TRL would end without a step
        raise ValueError(
            f"train_dataset has {len(train)} prompts, but a rollout needs {needed}: "
            f"per_device_train_batch_size={args.per_device_train_batch_size} x processes x "
            f"steps_per_generation={args.steps_per_generation} / "
            f"num_generations={args.num_generations}. Add prompts, or lower steps_per_generation "
            "and gradient_accumulation_steps, or per_device_train_batch_size."
        )
    if vars(args).get("dynamic_sampling"):
        check_plain_generation(arguments, "dynamic_sampling=True")
    rewards: Any = arguments.get("reward_funcs")
    if not isinstance(rewards, list):
        rewards = [rewards]
    for function in rewards:
        check_reward(function, args, arguments)
    judge = vars(args).get("dynamic_sampling_reward")
    known = [getattr(function, "__name__", None) for function in rewards]
    if judge is not None and None not in known and judge not in known:
        raise ValueError(
            f"dynamic_sampling_reward={judge!r} is not the name of a reward function: use one of "
            f"{', '.join(map(repr, known))}."
        )


def check_columns(name: str, dataset: Any) -> None:
    """Raise `ValueError` if a dataset has columns, but no prompts."""
    columns = columns_of(dataset)
    if columns and "prompt" not in columns:
        raise ValueError(
            f"{name} has no column 'prompt', only {', '.join(map(repr, columns))}: rename one with "
            f"dataset.rename_column({columns[0]!r}, 'prompt'), or make one with dataset.map(...)."
        )


def check_plain_generation(arguments: Mapping[str, Any], setting: str) -> None:
    """Raise `ValueError` unless every completion is one answer to a text prompt.

    The dataset of the prompts must be read by index.
    """
    dataset = arguments.get("train_dataset")
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"{setting} does not work with a streaming dataset: load it with streaming=False."
        )
    for name in ("tools", "rollout_func", "environment_factory"):
        if arguments.get(name):
            raise ValueError(f"{setting} does not work with {name}: remove one of them.")
    if {"image", "images"} & set(columns_of(dataset) or ()):
        raise ValueError(f"{setting} does not work with images: leave it out.")


def columns_of(dataset: Any) -> list[str] | None:
    """Return the columns of a dataset's rows, which a transform may make.

    `None` if only reading it would tell.
    """
    if isinstance(dataset, Dataset) and len(dataset):
        return list(dataset[0])
    return getattr(dataset, "column_names", None)


def check_reward(function: Any, args: TrainingArguments, arguments: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a reward function that TRL cannot call; models pass."""
    if isinstance(function, nn.Module) or not callable(function):
        return
    columns = columns_of(arguments.get("train_dataset")) or []
    removed = []
    if args.remove_unused_columns:
        removed = [column for column in columns if column not in KEPT]
    names = list(REWARD_KEYWORDS)
    passed = [column for column in columns if column not in (*removed, *NOT_PASSED)]
    for column in passed:
        if column in REWARD_KEYWORDS:
            raise ValueError(
                f"train_dataset has a column {column!r}, but TRL passes its own {column} to reward "
                f"functions: rename the column with dataset.rename_column({column!r}, ...)."
            )
    names += passed
    has_environments = arguments.get("environment_factory") is not None
    if has_environments:
        names.append("environments")
    # A wrapper may take other arguments, or add some.
    signature = inspect.signature(function, follow_wrapped=False)
    # Streams, rollout functions and environments may pass more names, so unfilled parameters are
    # not errors.
    bind = signature.bind_partial
    if columns and not has_environments and arguments.get("rollout_func") is None:
        bind = signature.bind
    try:
        bind(**dict.fromkeys(names))
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        way = "Accept the ones you need, and **kwargs for the rest."
        if removed:
            way = f"remove_unused_columns=True removes {', '.join(removed)}: set it to False. {way}"
        raise ValueError(
            f"TRL cannot call the reward function {name!r} ({error}): it passes "
            f"{', '.join(names)} by name. {way}"
        ) from None


def check_adapter(model: PreTrainedModel | str, peft_config: Any) -> None:
    """Raise `ValueError` for an adapter that no sync can merge."""
    configs = [] if peft_config is None else [peft_config]
    if not isinstance(model, str) and is_peft_model(model):
        configs += model.peft_config.values()
    for config in configs:
        tokens = [name for name in ONLY_TOKENS if vars(config).get(name)]
        if config.peft_type.value not in MERGED.split() or tokens:
            method = f"{type(config).__name__} ({', '.join(tokens) or config.peft_type.value})"
            raise ValueError(
                f"{method} is a PEFT method that cannot be merged into the weights, or was never "
                "tried, but each sync quantizes merged weights: use LoRA alone, or omit "
                "peft_config."
            )


def check_full_precision(
    model: PreTrainedModel | str, quantization_config: Any, loading: Mapping[str, Any]
) -> None:
    """Raise `ValueError` if the model is, or would be loaded, quantized.

    A sync needs full-precision weights. Raises `FileNotFoundError` for a local directory without
    a model.
    """
    if isinstance(model, str) and is_local(model):
        check_model_directory(
            Path(model, loading.get("subfolder", "")),
            f"load its base, and pass PeftModel.from_pretrained(base, {model!r}, "
            "is_trainable=True) to continue training it",
        )
    cause = _quantized_by(model, quantization_config, loading)
    if cause is not None:
        raise ValueError(
            f"The policy is quantized for training ({cause}), but each sync quantizes its "
            "full-precision weights: load it in 16 bits, without quantization_config. For a "
            "rounded base of an adapter, set round_base=True."
        )


def _quantized_by(
    model: PreTrainedModel | str, quantization_config: Any, loading: Mapping[str, Any]
) -> str | None:
    """Return what quantizes a policy; `None` if nothing does."""
    configs = [
        config
        for config in (quantization_config, *loading.values())
        if isinstance(config, QuantizationConfigMixin)
    ]
    for config in configs:
        if not vars(config).get("dequantize"):
            return type(config).__name__
    if not isinstance(model, str):
        is_quantized = vars(model.config).get("quantization_config")
        return f"{type(model).__name__} in memory" if is_quantized else None
    if configs:  # they say how to load what is stored
        return None
    try:
        stored = PretrainedConfig.get_config_dict(model, **loading)[0]
    except OSError as error:  # without the model's name, if the Hub cannot be asked
        error.add_note(f"The model is {model!r}: there is no such directory.")
        raise
    if stored.get("quantization_config"):
        return f"quantization_config in the config.json of {model}"
    return None
