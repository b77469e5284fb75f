"""A trainer's arguments, checked before an engine starts: TRL would report most of these errors
minutes later.
"""

import dataclasses
import inspect
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from datasets import Dataset
from torch import nn
from transformers import PretrainedConfig
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME
from transformers.utils.quantization_config import QuantizationConfigMixin
from trl.import_utils import is_vllm_available

from trl_qurl.paths import home_advice, is_local
from trl_qurl.quantization.formats import gpu_capability
from trl_qurl.rollout.engine.hardware import WORTH_COMPILING
from trl_qurl.rollout.preparation import RolloutSettings

# What TRL passes to every reward function by name, before the dataset's columns.
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
# exactly
MERGED = "BOFT C3A DELORA FOURIERFT GRALORA HRA IA3 LOHA LOKR LORA MISS OFT PSOFT SHIRA WAVEFT"
# settings of adapters for some tokens
ONLY_TOKENS = ("alora_invocation_tokens", "trainable_token_indices")


def checked_config(trainer: Any, config: Any, model: Any) -> Any:
    """Return a config of this trainer class; the default one if `config` is `None`."""
    if not is_vllm_available():
        raise ImportError(
            "Quantized rollouts need vLLM, which is not installed: run `pip install "
            "'trl-qurl[vllm]'` (TRL imports it here even if a server generates), or train with "
            "TRL's own trainer and use_vllm=False."
        )
    config_class = trainer._config_class
    if config is None:
        name = model if isinstance(model, str) else model.config._name_or_path
        return config_class(f"{name.split('/')[-1] or 'model'}-QuRL-{trainer._algorithm}")
    # GRPOConfig for ours
    if type(config) in config_class.__mro__ and type(config).__module__.startswith("trl."):
        # TRL has derived generation_batch_size from steps_per_generation, and rejects a config with
        # both.
        names = {field.name for field in dataclasses.fields(config) if field.init} - {
            "generation_batch_size"
        }
        return config_class(**{name: getattr(config, name) for name in names} | {"use_vllm": True})
    if not isinstance(config, config_class):
        needed = f"{config_class.__module__.partition('.')[0]}.{config_class.__name__}"
        given = f"args is a {type(config).__name__}, which lacks settings of {trainer.__name__}"
        raise TypeError(f"{given}: pass a {needed} (it takes the same fields and adds its own).")
    return config


def rollout_settings(args: Any) -> RolloutSettings:
    """Return the rollout settings of a config as flat values. A short run on a CPU ends before
    compiling pays.
    """
    answers = args.max_steps * args.gradient_accumulation_steps * args.per_device_train_batch_size
    is_short = (
        0 < answers * (args.max_completion_length or 0) < WORTH_COMPILING
        and gpu_capability() is None
    )
    return RolloutSettings(
        formats=args.rollout_quantization,
        ignore=tuple(args.quantization_ignore),
        is_served=args.vllm_mode == "server",
        weight_sync=args.weight_sync,
        round_base=args.round_base,
        smooths=args.smooths,
        checkpoint_dir=args.rollout_checkpoint_dir,
        engine_kwargs=({"enforce_eager": True} if is_short else {}) | args.engine_kwargs,
        seed=args.seed,
        sync_check_interval=args.sync_check_interval,
        request_timeout=args.vllm_request_timeout,
    )


def applies_uaq(args: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether to rescale the model for UAQ; warn if an adapter forbids it."""
    model = arguments["model"]
    is_adapted = arguments.get("peft_config") is not None or (
        not isinstance(model, str) and is_peft_model(model)
    )
    if args.uaq_scale != 1.0 and is_adapted:
        reason = "an adapter trained on rescaled weights would not fit the original model"
        text = (
            f"uaq_scale={args.uaq_scale} is not applied: {reason}. Set uaq_scale=1.0 to avoid this "
            "warning."
        )
        warnings.warn(text, stacklevel=3)
    return args.uaq_scale != 1.0 and not is_adapted


def check_arguments(args: Any, arguments: Mapping[str, Any]) -> None:
    """Raise for datasets and reward functions that training cannot use.

    `arguments` are the constructor's, by TRL's names; `args` is the config among them.
    """
    train: Any = arguments.get("train_dataset")
    evaluation = arguments.get("eval_dataset")
    if arguments.get("environment_factory") is None:  # an environment brings its own prompts
        evaluation = evaluation if isinstance(evaluation, dict) else {"eval_dataset": evaluation}
        for name, dataset in {"train_dataset": train, **evaluation}.items():
            if (columns := columns_of(dataset)) and "prompt" not in columns:
                names = list(map(repr, columns))
                way = (
                    f"rename one with dataset.rename_column({names[0]}, 'prompt'), or make one "
                    "with dataset.map(...)"
                )
                raise ValueError(f"{name} has no column 'prompt', only {', '.join(names)}: {way}.")
    needed = args.generation_batch_size // args.num_generations
    if hasattr(train, "__len__") and len(train) < needed:  # TRL would end without a step
        raise ValueError(
            f"train_dataset has {len(train)} prompts, but a rollout needs {needed} "
            "(per_device_train_batch_size x processes x steps_per_generation / num_generations): "
            "add prompts, or make rollouts smaller."
        )
    for setting in ("rollouts_ahead", "dynamic_sampling"):
        if value := vars(args).get(setting):
            check_plain_generation(arguments, f"{setting}={value}")
    rewards: Any = arguments.get("reward_funcs")
    rewards = rewards if isinstance(rewards, list) else [rewards]
    for function in rewards:
        check_reward(function, args, arguments)
    judge, known = (
        vars(args).get("dynamic_sampling_reward"),
        [getattr(each, "__name__", None) for each in rewards],
    )
    if judge is not None and None not in known and judge not in known:
        problem = f"dynamic_sampling_reward={judge!r} is not the name of a reward function"
        raise ValueError(f"{problem}: use one of {', '.join(map(repr, known))}.")


def check_plain_generation(arguments: Mapping[str, Any], setting: str) -> None:
    """Raise `ValueError` unless every completion is one answer to a text prompt of a dataset read
    by index.
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
    """Return the columns of a dataset's rows, which a transform may make; `None` if only reading it
    would tell.
    """
    if isinstance(dataset, Dataset) and len(dataset):
        return list(dataset[0])
    return getattr(dataset, "column_names", None)


def check_reward(function: Any, args: Any, arguments: Mapping[str, Any]) -> None:
    """Raise `TypeError` for a reward function that TRL cannot call; models pass."""
    if isinstance(function, nn.Module) or not callable(function):
        return
    columns = columns_of(arguments.get("train_dataset")) or []
    kept = [name for name in columns if name in KEPT] if args.remove_unused_columns else columns
    names = [*REWARD_KEYWORDS, *(name for name in kept if name not in NOT_PASSED)]
    names += ["environments"] if arguments.get("environment_factory") is not None else []
    # a wrapper may take other arguments, or add some
    signature = inspect.signature(function, follow_wrapped=False)
    # Streams, rollout functions and environments may pass more names, so unfilled parameters are
    # not errors.
    is_complete = columns and "environments" not in names and arguments.get("rollout_func") is None
    try:
        (signature.bind if is_complete else signature.bind_partial)(**dict.fromkeys(names))
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        problem = (
            f"TRL cannot call the reward function {name!r} ({error}): it passes {', '.join(names)} "
            "by name"
        )
        way = "Accept the ones you need, and **kwargs for the rest"
        if len(kept) < len(columns):
            removed = ", ".join(name for name in columns if name not in kept)
            way = f"remove_unused_columns=True removes {removed}: set it to False. {way}"
        raise TypeError(f"{problem}. {way}.") from None


def check_adapter(model: Any, peft_config: Any) -> None:
    """Raise `ValueError` for an adapter that cannot be merged into the weights for a sync, or is
    passed as a model.
    """
    files = os.listdir(model) if isinstance(model, str) and Path(model).is_dir() else []
    if ADAPTER_CONFIG_NAME in files and CONFIG_NAME not in files:
        raise ValueError(
            f"{model} holds an adapter, and no model: load its base, and pass "
            f"PeftModel.from_pretrained(base, {model!r}, is_trainable=True) to go on training it."
        )
    configs = (
        model.peft_config.values() if not isinstance(model, str) and is_peft_model(model) else ()
    )
    for config in filter(None, (*configs, peft_config)):
        tokens = [name for name in ONLY_TOKENS if vars(config).get(name)]
        if config.peft_type.value not in MERGED.split() or tokens:
            method = f"{type(config).__name__} ({', '.join(tokens) or config.peft_type.value})"
            raise ValueError(
                f"{method} is a PEFT method that cannot be merged into the weights, or was never "
                "tried, but each sync quantizes merged weights: use LoRA alone, or omit "
                "peft_config."
            )


def check_full_precision(model: Any, quantization_config: Any, loading: Mapping[str, Any]) -> None:
    """Raise `ValueError` if the model is, or would be loaded, quantized: a sync needs
    full-precision weights.
    """
    if isinstance(model, str) and is_local(model) and not Path(model).is_dir():
        way = (
            "give a directory with a config.json, or a name on the Hub such as "
            "Qwen/Qwen2.5-0.5B-Instruct"
        )
        raise FileNotFoundError(f"The model {model} does not exist: {way}.{home_advice(model)}")
    configs = [
        each
        for each in (quantization_config, *loading.values())
        if isinstance(each, QuantizationConfigMixin)
    ]
    causes = [type(config).__name__ for config in configs if not vars(config).get("dequantize")]
    if isinstance(model, str) and not configs:
        with suppress(OSError):  # loading it says what is missing
            stored = PretrainedConfig.get_config_dict(model, **loading)[0].get(
                "quantization_config"
            )
            causes += [f"quantization_config in the config.json of {model}"] if stored else []
    if not isinstance(model, str) and vars(model.config).get("quantization_config"):
        causes.append(f"{type(model).__name__} in memory")
    if causes:
        raise ValueError(
            f"The policy is quantized for training ({causes[0]}), but each sync quantizes its "
            "full-precision weights: load it in 16 bits, without quantization_config. For a "
            "rounded base of an adapter, set round_base=True."
        )
