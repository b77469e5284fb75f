"""What a trainer cannot use of its constructor's arguments, said before an engine starts.

TRL would report most of these errors minutes later. `arguments` are named as TRL names them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from transformers import PreTrainedModel, TrainingArguments

# PEFT's methods that merge exactly.
MERGED = "BOFT C3A DELORA FOURIERFT GRALORA HRA IA3 LOHA LOKR LORA MISS OFT PSOFT SHIRA WAVEFT"
# Settings that limit an adapter to some tokens, so it cannot be merged.
ONLY_TOKENS = ("alora_invocation_tokens", "trainable_token_indices")


def check_arguments(args: TrainingArguments, arguments: Mapping[str, Any]) -> None:
    """Raise `ValueError` for data that training cannot use."""
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
        check_plain_answers(arguments)


def check_plain_answers(arguments: Mapping[str, Any]) -> None:
    """Raise `ValueError` for what dynamic sampling cannot draw again.

    That is all but one answer to a text prompt, of a dataset that is read by index.
    """
    dataset = arguments.get("train_dataset")
    obstacles = [
        name for name in ("tools", "rollout_func", "environment_factory") if arguments.get(name)
    ]
    if not hasattr(dataset, "__len__"):
        obstacles.append("a streaming dataset")
    if {"image", "images"} & set(getattr(dataset, "column_names", None) or ()):
        obstacles.append("images")
    if obstacles:
        raise ValueError(
            f"dynamic_sampling=True does not work with {' and '.join(obstacles)}: do without, or "
            "set dynamic_sampling=False."
        )


def check_adapter(model: PreTrainedModel | str, peft_config: Any) -> None:
    """Raise `ValueError` for an adapter that no sync can merge."""
    if isinstance(model, str) and Path(model, "adapter_config.json").is_file():
        raise ValueError(
            f"{model} holds an adapter, and no model: to continue training it, load its base, and "
            f"pass PeftModel.from_pretrained(base, {model!r}, is_trainable=True)."
        )
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


def check_full_precision(model: PreTrainedModel) -> None:
    """Raise `ValueError` if a model was loaded quantized: a sync needs full-precision weights."""
    if vars(model.config).get("quantization_config"):
        raise ValueError(
            f"The policy, {model.name_or_path or 'a model in memory'}, is quantized for training, "
            "but each sync quantizes its full-precision weights: load it in 16 bits, without "
            "quantization_config. For a rounded base of an adapter, set round_base=True."
        )
