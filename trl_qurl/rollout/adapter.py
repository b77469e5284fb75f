"""A LoRA adapter that is sent alone: the engine needs the frozen base once, quantized, and the
adapter at every sync.

An adapter is sent as PEFT saves it, except that B is already multiplied by the adapter's scaling,
and the config sets that to 1. vLLM reads one scaling for all layers from the config: that would be
wrong for rank or alpha patterns.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn

from trl_qurl.quantization.checkpoint_form import (
    CheckpointForm,
    NamedTensors,
    expert_layers,
    parameter_name,
    whole,
)
from trl_qurl.quantization.fake_quantization import check_unrounded
from trl_qurl.quantization.merging import gathered
from trl_qurl.quantization.plan import QuantizationPlan
from trl_qurl.quantization.storage import new_directory, write_tensors

ADAPTER_FILE = "adapter_model.safetensors"  # PEFT's name, which vLLM expects
ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # maximum ranks that vLLM can be started with


def adapter_obstacle(model: Any) -> str | None:
    """Explain why a policy's adapter cannot be sent alone, as a clause for a message; `None` if it
    can.
    """
    if not is_peft_model(model):
        return "the policy has no adapter (peft_config)"
    config, active = model.peft_config[model.active_adapters[0]], model.active_adapters
    if len(active) > 1:
        return f"{len(active)} adapters are active"
    if config.peft_type.value != "LORA":
        return f"it is {config.peft_type.value}, but vLLM supports only LoRA"
    if getattr(model.config, "vision_config", None) is not None:
        return "adapters of vision-language models are untested"
    if config.lora_bias or config.target_parameters:
        return (
            f"vLLM does not load lora_bias={config.lora_bias}, "
            f"target_parameters={config.target_parameters}"
        )
    head, form = (
        model.get_base_model().get_output_embeddings(),
        CheckpointForm(model, splits_experts=False),
    )
    for path, layer in _adapted_layers(model):
        name, base = parameter_name(path), layer.get_base_layer()
        if form.name(name) != name:
            return f"{name} has a different name in the checkpoint that the engine loads"
        if not isinstance(base, nn.Linear) or (
            head is not None and base.weight is getattr(head, "weight", None)
        ):
            return f"it adapts {name}, which is not a linear layer inside the model"
        if getattr(layer, "lora_variant", None):
            return f"{name} uses a LoRA variant that vLLM does not support (such as DoRA)"
    others = [
        name for name, p in model.named_parameters() if p.requires_grad and ".lora_" not in name
    ]
    if others:
        return f"{parameter_name(others[0])} is trained as well"
    rank = adapter_rank(model)
    return (
        None
        if rank <= ENGINE_RANKS[-1]
        else f"its rank {rank} exceeds vLLM's maximum of {ENGINE_RANKS[-1]}"
    )


def check_rounding(model: Any, plan: QuantizationPlan) -> None:
    """Raise `ValueError` if the trainer cannot round the base
    below an adapter as the engine does.
    """
    check_unrounded(model)
    if expert_layers(plan.schemes):
        raise ValueError(
            "round_base=True does not round experts in the trainer, but the engine would: add "
            "'re:.*\\.experts\\.' to quantization_ignore, or set round_base=False."
        )


def adapter_rank(model: Any) -> int:
    """Return the highest rank among the adapter's layers and its config, which vLLM checks."""
    adapter = model.active_adapters[0]
    return max(
        [model.peft_config[adapter].r, *(layer.r[adapter] for _, layer in _adapted_layers(model))]
    )


def engine_rank(rank: int) -> int:
    """Return the lowest rank to start an engine with that accepts adapters of this rank."""
    return next(allowed for allowed in ENGINE_RANKS if allowed >= rank)


def adapter_tensors(
    model: Any, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield A (rank, in) and scaled B (out, rank) of each layer, under PEFT's names. A collective
    operation.
    """
    for name, layer in _adapted_layers(model):
        adapter = model.active_adapters[0]
        a, b, is_used = (
            layer.lora_A[adapter].weight,
            layer.lora_B[adapter].weight,
            not layer.disable_adapters,
        )
        with whole([a, b]):
            for part, tensor in (
                ("lora_A", gathered(a)),
                ("lora_B", gathered(b) * layer.scaling[adapter] * is_used),
            ):
                yield (
                    f"{name.replace('_checkpoint_wrapped_module.', '')}.{part}.weight",
                    tensor.to(dtype or a.dtype),
                )


def write_adapter(model: Any, tensors: NamedTensors, directory: Path) -> None:
    """Write the tensors from `adapter_tensors` and the adapter's config in one step."""
    config = copy.copy(model.peft_config[model.active_adapters[0]])
    config.lora_alpha, config.alpha_pattern = config.r, dict(config.rank_pattern)
    config.use_rslora, config.inference_mode = False, True
    # some initializations change the base, and would again on loading
    config.init_lora_weights = True
    with new_directory(directory) as tmp:
        write_tensors(tensors, tmp)
        (tmp / "model.safetensors").rename(tmp / ADAPTER_FILE)
        config.save_pretrained(tmp)


def _adapted_layers(model: Any) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    modules, adapter = model.named_modules(), model.active_adapters[0]
    return (
        (name, module)
        for name, module in modules
        if isinstance(module, LoraLayer) and adapter in module.r
    )
