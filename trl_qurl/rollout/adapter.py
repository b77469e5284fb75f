"""A LoRA adapter that is sent alone: the engine needs the frozen base once, and the adapter at every sync.

An adapter is sent as PEFT saves it, except that B is already multiplied by the adapter's scaling, and the config sets
that to 1. vLLM reads one scaling for all layers from the config: that would be wrong for rank or alpha patterns.
"""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn
from torch.distributed.tensor import DTensor

from trl_qurl.quantization.checkpoint_form import CheckpointForm, NamedTensors, parameter_name, whole
from trl_qurl.quantization.storage import new_directory, write_tensors

ADAPTER_FILE = "adapter_model.safetensors"  # PEFT's name, which vLLM expects

ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum ranks that vLLM can be started with; it accepts adapters up to that rank."""


def adapter_obstacle(model: Any) -> str | None:
    """Explain why a policy's adapter cannot be sent alone, as a clause for a message; `None` if it can."""
    if not is_peft_model(model):
        return "the policy has no adapter (peft_config)"
    config, active = model.peft_config[model.active_adapters[0]], model.active_adapters
    reasons = {
        f"{len(active)} adapters are active": len(active) > 1,
        f"it is {config.peft_type.value}, but vLLM supports only LoRA": config.peft_type.value != "LORA",
    }
    if not any(reasons.values()):
        reasons |= {
            "vLLM does not support DoRA": config.use_dora,
            f"it trains biases (bias={config.bias!r}, lora_bias={config.lora_bias})": config.bias != "none"
            or config.lora_bias,
            f"it trains whole modules (modules_to_save={config.modules_to_save})": bool(config.modules_to_save),
            "it adapts parameters that are not linear layers (target_parameters)": bool(config.target_parameters),
            "it trains the embeddings of some tokens (trainable_token_indices)": bool(config.trainable_token_indices),
        }
    if obstacles := [reason for reason, applies in reasons.items() if applies]:
        return obstacles[0]
    return _unfit_layer(model) or _unfit_parameter(model)


def _unfit_layer(model: Any) -> str | None:
    head, form = model.get_base_model().get_output_embeddings(), CheckpointForm(model, splits_experts=False)
    if getattr(model.config, "vision_config", None) is not None:
        return "adapters of vision-language models are untested"
    for name, layer in _adapted_layers(model):
        if form.name(parameter_name(name)) != parameter_name(name):
            return f"{parameter_name(name)} has a different name in the checkpoint that the engine loads"
        base = layer.get_base_layer()
        if not isinstance(base, nn.Linear) or (head is not None and base.weight is getattr(head, "weight", None)):
            return f"it adapts {parameter_name(name)}, which is not a linear layer inside the model"
        if getattr(layer, "lora_variant", None):
            return f"{parameter_name(name)} uses a LoRA variant that vLLM does not support"
    rank = adapter_rank(model)
    return None if rank <= ENGINE_RANKS[-1] else f"its rank {rank} exceeds vLLM's maximum of {ENGINE_RANKS[-1]}"


def _unfit_parameter(model: nn.Module) -> str | None:
    others = [name for name, p in model.named_parameters() if p.requires_grad and ".lora_" not in name]
    return f"{parameter_name(others[0])} is trained as well" if others else None


def adapter_rank(model: Any) -> int:
    """Return the highest rank among the adapter's layers and its config, which vLLM checks."""
    adapter = model.active_adapters[0]
    return max([model.peft_config[adapter].r, *(layer.r[adapter] for _, layer in _adapted_layers(model))])


def engine_rank(rank: int) -> int:
    """Return the lowest rank to start an engine with that accepts adapters of this rank."""
    return next(allowed for allowed in ENGINE_RANKS if allowed >= rank)


def adapter_tensors(model: Any, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield A (rank, in) and scaled B (out, rank) of each layer under PEFT's names. A collective operation.

    They are cast to `dtype`, or keep their own.
    """
    for name, layer in _adapted_layers(model):
        adapter = model.active_adapters[0]
        a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        with whole([a, b]):
            parts = (("lora_A", gathered(a)), ("lora_B", gathered(b) * layer.scaling[adapter]))
            for part, tensor in parts:
                yield f"{plain_name(name)}.{part}.weight", tensor.to(dtype or a.dtype)


def write_adapter(model: Any, tensors: NamedTensors, directory: Path) -> None:
    """Write the tensors from `adapter_tensors` and the adapter's config in one step."""
    config = copy.copy(model.peft_config[model.active_adapters[0]])
    config.lora_alpha, config.alpha_pattern = config.r, dict(config.rank_pattern)
    config.use_rslora, config.inference_mode = False, True
    config.init_lora_weights = True  # some initializations change the base, and would again on loading
    with new_directory(directory) as tmp:
        write_tensors(tensors, tmp)
        (tmp / "model.safetensors").rename(tmp / ADAPTER_FILE)
        config.save_pretrained(tmp)


def _adapted_layers(model: Any) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    modules, adapter = model.named_modules(), model.active_adapters[0]
    return ((name, module) for name, module in modules if isinstance(module, LoraLayer) and adapter in module.r)


def gathered(parameter: torch.Tensor) -> torch.Tensor:
    """Return the whole parameter, which FSDP 2 may have sharded. A collective operation."""
    tensor = parameter.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain_name(name: str) -> str:
    """Strip the wrappers of activation checkpointing from a name."""
    return re.sub(r"_checkpoint_wrapped_module\.", "", name)
