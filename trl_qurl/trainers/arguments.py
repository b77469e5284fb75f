"""What a trainer is given, besides its config: by the names that TRL has for it, and checked before an engine starts.

Everything here but `LengthCheckCallback` needs the arguments alone, and no loaded model. TRL would notice most of it
after the first rollout.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from accelerate.utils import is_peft_model
from torch import nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.utils.quantization_config import QuantizationConfigMixin

REWARD_KEYWORDS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What TRL passes to every reward function by name, before the columns of the data set."""

NOT_PASSED = ("prompt", "completion", "completion_ids")
"""The columns that it leaves out."""

UNMERGED = ("ADAPTION_PROMPT", "OSF", "POLY", "SHADOW", "XLORA")
"""Methods of PEFT that cannot merge their adapter and take it out again, besides those that learn a prompt."""


def arguments_by_name(trainer: type, positional: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by the names that the constructor of TRL's trainer has for them.

    Args:
        trainer: TRL's trainer or a subclass of it.
        positional: Arguments in TRL's order, `model` first.
        named: Arguments by name.

    Returns:
        Both, by name.

    Raises:
        TypeError: There are too many, or one is given twice.
    """
    bases = [kind for kind in trainer.__mro__ if kind.__module__.startswith("trl.")]
    signatures = [inspect.signature(kind) for kind in bases]  # of which some take `**kwargs` for their parent's
    theirs = next(signature for signature in signatures if "train_dataset" in signature.parameters)
    given = theirs.bind_partial(*positional).arguments
    if twice := given.keys() & named.keys():
        raise TypeError(f"{trainer.__name__} got {', '.join(sorted(twice))} by position and by name: give it once.")
    return {**given, **named}


def check_arguments(args: Any, given: Mapping[str, Any]) -> None:
    """Refuse what cannot be trained with: data without prompts, unfit reward functions, models and adapters.

    Args:
        args: The config.
        given: The constructor's other arguments, by TRL's names.

    Raises:
        ValueError: A model or a data set cannot be used; the message says what to do.
        TypeError: A reward function does not take what TRL passes to it.
    """
    arguments = [given.get("quantization_config"), *(args.model_init_kwargs or {}).values()]
    check_full_precision(given["model"], arguments)
    check_adapter(given["model"], given.get("peft_config"))
    train, evaluated, rewards = (given.get(name) for name in ("train_dataset", "eval_dataset", "reward_funcs"))
    if given.get("environment_factory") is None:  # which gives the prompts itself
        evaluated = evaluated if isinstance(evaluated, dict) else {"eval_dataset": evaluated}
        for name, dataset in {"train_dataset": train, **evaluated}.items():
            check_prompt_column(name, dataset)
    check_prompts(train, args.generation_batch_size // args.num_generations)
    for function in rewards if isinstance(rewards, list) else [rewards]:
        check_reward(function, args, given)


def check_prompt_column(name: str, dataset: Any) -> None:
    """Refuse a data set whose columns are known, with no `prompt` among them."""
    columns = getattr(dataset, "column_names", None)  # a stream may not know them before it is read
    if columns and "prompt" not in columns:
        first = next(iter(columns))
        raise ValueError(
            f"{name} has no column 'prompt', only {', '.join(map(repr, columns))}: rename one with "
            f"dataset.rename_column({first!r}, 'prompt'), or make one with "
            "dataset.map(lambda row: {'prompt': ...})."
        )


def check_prompts(dataset: Any, per_rollout: int) -> None:
    """Refuse a data set that does not fill one rollout, with which TRL ends without a step; not a streamed one."""
    if hasattr(dataset, "__len__") and len(dataset) < per_rollout:
        raise ValueError(
            f"train_dataset has {len(dataset)} prompts and a rollout takes {per_rollout} (per_device_train_batch_size "
            "x processes x steps_per_generation / num_generations): give more prompts, or make rollouts smaller."
        )


def check_reward(function: Any, args: Any, given: Mapping[str, Any]) -> None:
    """Refuse a reward function that TRL cannot call; models pass, and what hides its parameters."""
    if isinstance(function, nn.Module) or not callable(function):
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    columns = getattr(given.get("train_dataset"), "column_names", None)
    columns = [] if columns is None or args.remove_unused_columns else columns
    environments = given.get("environment_factory") and ["environments"]
    names = [*REWARD_KEYWORDS, *(environments or []), *(name for name in columns if name not in NOT_PASSED)]
    # A stream, a rollout function or an environment may have more to pass: then nothing can be said to be missing.
    is_complete = columns and not environments and given.get("rollout_func") is None
    try:
        (signature.bind if is_complete else signature.bind_partial)(**dict.fromkeys(names))
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(
            f"TRL cannot call the reward function {name!r} ({error}): it passes {', '.join(names)} by name. Take "
            "those that you need, and **kwargs for the others."
        ) from None


def check_adapter(model: Any, peft_config: Any) -> None:
    """Refuse an adapter that cannot be merged into the weights for a sync, and taken out again."""
    kept = model.peft_config.values() if not isinstance(model, str) and is_peft_model(model) else ()
    for config in [*kept, *([] if peft_config is None else [peft_config])]:
        activated = vars(config).get("alora_invocation_tokens")  # aLoRA: an adapter for some tokens alone
        if config.is_prompt_learning or config.peft_type in UNMERGED or activated:
            raise ValueError(
                f"{type(config).__name__} ({'aLoRA' if activated else config.peft_type.value}) is a method of PEFT "
                "that cannot be merged into the weights, and each sync quantizes merged weights: use LoRA, or leave "
                "peft_config out."
            )


def check_full_precision(model: Any, arguments: list[Any]) -> None:
    """Refuse a model that is quantized for training, or arguments that load one so; a sync could not read it."""
    asked = [value for value in arguments if isinstance(value, QuantizationConfigMixin)]
    kept = [type(value).__name__ for value in asked if not vars(value).get("dequantize")]
    if not isinstance(model, str) and vars(model.config).get("quantization_config"):
        kept.append(f"{type(model).__name__} in memory")
    if kept:
        raise ValueError(
            f"The policy is quantized for training ({kept[0]}), but each sync quantizes its full-precision weights: "
            "load it in 16 bits, without quantization_config. For an adapter on a base that is rounded as the engine "
            "does it, set round_base=True."
        )


class LengthCheckCallback(TrainerCallback):
    """Refuses completions longer than the model, once that is loaded and before an engine starts."""

    def on_init_end(self, args: Any, *others: Any, model: PreTrainedModel, **kwargs: Any) -> None:
        """Compare the two lengths."""
        text = model.config.get_text_config()
        stretched = (getattr(text, "rope_parameters", None) or {}).get("factor") or 1  # YaRN and others
        positions = int((getattr(text, "max_position_embeddings", None) or 0) * stretched)
        length = args.max_completion_length or 0
        if positions and length > positions and length != type(args).max_completion_length:  # the default is no wish
            raise ValueError(
                f"max_completion_length is {args.max_completion_length}, but the model has {positions} positions "
                "(max_position_embeddings), for prompt and completion together: lower it."
            )
