"""A LoRA adapter that is sent alone: at every sync, to an engine that has the quantized base.

An adapter is sent as PEFT saves it, except that B is already multiplied by the adapter's scaling,
and the config sets that to 1. vLLM reads one scaling for all layers from the config: that would be
wrong for rank or alpha patterns.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

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
from trl_qurl.quantization.files import new_directory
from trl_qurl.quantization.merging import gathered
from trl_qurl.quantization.plan import QuantizationPlan
from trl_qurl.quantization.rounded_base import check_unrounded
from trl_qurl.quantization.storage import write_tensors

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel

ADAPTER_FILE = "adapter_model.safetensors"  # PEFT's name, which vLLM expects
ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # maximum ranks that vLLM can be started with


def adapter_obstacle(model: "PreTrainedModel | PeftModel") -> str | None:
    """Explain why a policy's adapter cannot be sent alone, in a clause; `None` if it can."""
    if not is_peft_model(model):
        return "the policy has no adapter (peft_config)"
    return next(_obstacles(model), None)


def _obstacles(model: "PeftModel") -> Iterator[str]:
    active = model.active_adapters
    config = model.peft_config[active[0]]
    if len(active) > 1:
        yield f"{len(active)} adapters are active"
    if config.peft_type.value != "LORA":
        yield f"it is {config.peft_type.value}, but vLLM supports only LoRA"
    if getattr(model.config, "vision_config", None) is not None:
        yield "adapters of vision-language models are untested"
    if config.lora_bias or config.target_parameters:
        yield (
            f"vLLM does not load lora_bias={config.lora_bias}, "
            f"target_parameters={config.target_parameters}"
        )
    yield from _obstacles_of_layers(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and ".lora_" not in name:
            yield f"{parameter_name(name)} is trained as well"
    rank = adapter_rank(model)
    if rank > ENGINE_RANKS[-1]:
        yield f"its rank {rank} exceeds vLLM's maximum of {ENGINE_RANKS[-1]}"


def _obstacles_of_layers(model: "PeftModel") -> Iterator[str]:
    head_weight = getattr(model.get_base_model().get_output_embeddings(), "weight", None)
    form = CheckpointForm(model, splits_experts=False)
    for path, layer in _adapted_layers(model):
        name = parameter_name(path)
        base = layer.get_base_layer()
        if form.name(name) != name:
            yield f"{name} has a different name in the checkpoint that the engine loads"
        if not isinstance(base, nn.Linear) or base.weight is head_weight:
            yield f"it adapts {name}, which is not a linear layer inside the model"
        if getattr(layer, "lora_variant", None):
            yield f"{name} uses a LoRA variant that vLLM does not support (such as DoRA)"


def check_rounding(model: "PreTrainedModel | PeftModel", plan: QuantizationPlan) -> None:
    """Raise `ValueError` if the trainer cannot round an adapter's base as the engine does."""
    check_unrounded(model)
    if expert_layers(plan.schemes):
        raise ValueError(
            "round_base=True does not round experts in the trainer, but the engine would: add "
            "'re:.*\\.experts\\.' to quantization_ignore, or set round_base=False."
        )


def adapter_rank(model: "PeftModel") -> int:
    """Return the highest rank among the adapter's layers and its config, which vLLM checks."""
    adapter = model.active_adapters[0]
    ranks = [layer.r[adapter] for _, layer in _adapted_layers(model)]
    return max([model.peft_config[adapter].r, *ranks])


def engine_rank(rank: int) -> int:
    """Return the lowest rank to start an engine with that accepts adapters of this rank."""
    return next(allowed for allowed in ENGINE_RANKS if allowed >= rank)


def adapter_tensors(
    model: "PeftModel", dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield A (rank, in) and scaled B (out, rank) of each layer, under PEFT's names.

    A collective operation.
    """
    adapter = model.active_adapters[0]
    for name, layer in _adapted_layers(model):
        a = layer.lora_A[adapter].weight
        b = layer.lora_B[adapter].weight
        path = name.replace("_checkpoint_wrapped_module.", "")
        with whole([a, b]):
            whole_a = gathered(a)
            scaled_b = gathered(b) * layer.scaling[adapter]
            if layer.disable_adapters:
                scaled_b = scaled_b * 0
            yield f"{path}.lora_A.weight", whole_a.to(dtype or a.dtype)
            yield f"{path}.lora_B.weight", scaled_b.to(dtype or a.dtype)


def write_adapter(model: "PeftModel", tensors: NamedTensors, directory: Path) -> None:
    """Write the tensors from `adapter_tensors` and the adapter's config in one step."""
    config = copy.copy(model.peft_config[model.active_adapters[0]])
    config.lora_alpha = config.r
    config.alpha_pattern = dict(config.rank_pattern)
    config.use_rslora = False
    config.inference_mode = True
    # Some initializations change the base, and would again on loading.
    config.init_lora_weights = True
    with new_directory(directory) as tmp:
        write_tensors(tensors, tmp)
        (tmp / "model.safetensors").rename(tmp / ADAPTER_FILE)
        config.save_pretrained(tmp)


def _adapted_layers(model: "PeftModel") -> "Iterator[tuple[str, LoraLayer]]":
    from peft.tuners.lora import LoraLayer

    adapter = model.active_adapters[0]
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and adapter in module.r:
            yield name, module
