"""Checks of a trainer's arguments other than its config, by TRL's names, before an engine starts.

Everything here except `LengthCheckCallback` needs only the arguments, not a loaded model. TRL would report most of
these errors only after the first rollout.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from accelerate.utils import is_peft_model
from torch import nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.utils.quantization_config import QuantizationConfigMixin

REWARD_KEYWORDS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Keyword arguments that TRL passes to every reward function, before the dataset's columns."""

NOT_PASSED = ("prompt", "completion", "completion_ids")
"""Columns that TRL does not pass."""

UNMERGED = ("ADAPTION_PROMPT", "OSF", "POLY", "SHADOW", "XLORA")
"""PEFT methods, besides prompt learning, whose adapters cannot be merged and unmerged."""


def arguments_by_name(trainer: type, positional: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments by their names in the constructor of TRL's trainer.

    Args:
        trainer: TRL's trainer, or a subclass of it.
        positional: Arguments in TRL's order, `model` first.
        named: Arguments by name.

    Returns:
        All arguments by name.

    Raises:
        TypeError: There are too many arguments, or one is passed twice.
    """
    bases = [cls for cls in trainer.__mro__ if cls.__module__.startswith("trl.")]
    signatures = [inspect.signature(cls) for cls in bases]  # some take `**kwargs` for their parent
    complete = next(signature for signature in signatures if "train_dataset" in signature.parameters)
    by_position = complete.bind_partial(*positional).arguments
    if twice := by_position.keys() & named.keys():
        raise TypeError(f"{trainer.__name__} got {', '.join(sorted(twice))} by position and by name: pass it once.")
    return {**by_position, **named}


def check_arguments(args: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise for datasets, reward functions, models and adapters that training cannot use.

    Args:
        args: The trainer's config.
        kwargs: The constructor's other arguments, by TRL's names.

    Raises:
        ValueError: A model or a dataset cannot be used; the message says what to do.
        TypeError: A reward function does not accept what TRL passes to it.
    """
    arguments = [kwargs.get("quantization_config"), *(args.model_init_kwargs or {}).values()]
    check_full_precision(kwargs["model"], arguments)
    check_adapter(kwargs["model"], kwargs.get("peft_config"))
    train, evaluation, rewards = (kwargs.get(name) for name in ("train_dataset", "eval_dataset", "reward_funcs"))
    if kwargs.get("environment_factory") is None:  # an environment brings its own prompts
        evaluation = evaluation if isinstance(evaluation, dict) else {"eval_dataset": evaluation}
        for name, dataset in {"train_dataset": train, **evaluation}.items():
            check_prompt_column(name, dataset)
    check_prompts(train, args.generation_batch_size // args.num_generations)
    for function in rewards if isinstance(rewards, list) else [rewards]:
        check_reward(function, args, kwargs)


def check_prompt_column(name: str, dataset: Any) -> None:
    """Raise `ValueError` if the dataset's columns are known and do not include `prompt`."""
    columns = getattr(dataset, "column_names", None)  # unknown for some streams until they are read
    if columns and "prompt" not in columns:
        first = next(iter(columns))
        raise ValueError(
            f"{name} has no column 'prompt', only {', '.join(map(repr, columns))}: rename one with "
            f"dataset.rename_column({first!r}, 'prompt'), or make one with "
            "dataset.map(lambda row: {'prompt': ...})."
        )


def check_prompts(dataset: Any, per_rollout: int) -> None:
    """Raise `ValueError` if a non-streaming dataset is too small for a rollout; TRL would end without a step."""
    if hasattr(dataset, "__len__") and len(dataset) < per_rollout:
        raise ValueError(
            f"train_dataset has {len(dataset)} prompts, but a rollout needs {per_rollout} "
            "(per_device_train_batch_size x processes x steps_per_generation / num_generations): add prompts, or make "
            "rollouts smaller."
        )


def check_reward(function: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise `TypeError` for a reward function that TRL cannot call; models and unknown signatures pass."""
    if isinstance(function, nn.Module) or not callable(function):
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    columns = getattr(kwargs.get("train_dataset"), "column_names", None)
    columns = [] if columns is None or args.remove_unused_columns else columns
    environments = kwargs.get("environment_factory") and ["environments"]
    names = [*REWARD_KEYWORDS, *(environments or []), *(name for name in columns if name not in NOT_PASSED)]
    # Streams, rollout functions and environments may pass more names, so unfilled parameters are not errors.
    is_complete = columns and not environments and kwargs.get("rollout_func") is None
    try:
        (signature.bind if is_complete else signature.bind_partial)(**dict.fromkeys(names))
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(
            f"TRL cannot call the reward function {name!r} ({error}): it passes {', '.join(names)} by name. Accept "
            "the ones you need, and **kwargs for the rest."
        ) from None


def check_adapter(model: Any, peft_config: Any) -> None:
    """Raise `ValueError` for an adapter that cannot be merged into the weights for a sync and unmerged again."""
    configs = model.peft_config.values() if not isinstance(model, str) and is_peft_model(model) else ()
    for config in [*configs, *([] if peft_config is None else [peft_config])]:
        alora_tokens = vars(config).get("alora_invocation_tokens")  # aLoRA adapts only some tokens
        if config.is_prompt_learning or config.peft_type in UNMERGED or alora_tokens:
            raise ValueError(
                f"{type(config).__name__} ({'aLoRA' if alora_tokens else config.peft_type.value}) is a PEFT method "
                "that cannot be merged into the weights, but each sync quantizes merged weights: use LoRA, or omit "
                "peft_config."
            )


def check_full_precision(model: Any, arguments: list[Any]) -> None:
    """Raise `ValueError` if the model is, or would be loaded, quantized: a sync needs full-precision weights."""
    configs = [value for value in arguments if isinstance(value, QuantizationConfigMixin)]
    causes = [type(config).__name__ for config in configs if not vars(config).get("dequantize")]
    if not isinstance(model, str) and vars(model.config).get("quantization_config"):
        causes.append(f"{type(model).__name__} in memory")
    if causes:
        raise ValueError(
            f"The policy is quantized for training ({causes[0]}), but each sync quantizes its full-precision weights: "
            "load it in 16 bits, without quantization_config. For an adapter on a base that is rounded as in the "
            "engine, set round_base=True."
        )


class LengthCheckCallback(TrainerCallback):
    """Callback that rejects completions longer than the loaded model allows, before an engine starts."""

    def on_init_end(self, args: Any, *others: Any, model: PreTrainedModel, **kwargs: Any) -> None:
        """Compare the two lengths, once the model is loaded."""
        text = model.config.get_text_config()
        factor = (getattr(text, "rope_parameters", None) or {}).get("factor") or 1  # YaRN and others
        positions = int((getattr(text, "max_position_embeddings", None) or 0) * factor)
        length = args.max_completion_length or 0
        if positions and length > positions and length != type(args).max_completion_length:  # ignore the default
            raise ValueError(
                f"max_completion_length is {args.max_completion_length}, but the model has {positions} positions "
                "(max_position_embeddings), shared by prompt and completion: lower it."
            )
