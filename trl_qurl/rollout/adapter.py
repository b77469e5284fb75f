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

from trl_qurl.quantization.checkpoint_form import (
    NamedTensors,
    whole,
)
from trl_qurl.quantization.files import new_directory
from trl_qurl.quantization.merging import gathered
from trl_qurl.quantization.storage import write_tensors

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

ADAPTER_FILE = "adapter_model.safetensors"  # PEFT's name, which vLLM expects
ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # maximum ranks that vLLM can be started with


def adapter_rank(model: "PeftModel") -> int:
    """Return the highest rank among the adapter's layers and its config, which vLLM checks."""
    adapter = model.active_adapters[0]
    ranks = [layer.r[adapter] for _, layer in adapted_layers(model)]
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
    for name, layer in adapted_layers(model):
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
    # Some initializations change the base, and would again on loading.
    config.init_lora_weights = True
    with new_directory(directory) as tmp:
        write_tensors(tensors, tmp)
        (tmp / "model.safetensors").rename(tmp / ADAPTER_FILE)
        config.save_pretrained(tmp)


def adapted_layers(model: "PeftModel") -> "Iterator[tuple[str, LoraLayer]]":
    """Yield each layer with the active adapter, with its name."""
    from peft.tuners.lora import LoraLayer

    adapter = model.active_adapters[0]
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and adapter in module.r:
            yield name, module
