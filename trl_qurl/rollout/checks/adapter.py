"""Checks of an adapter: can it be sent alone, and can the trainer round its base?"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from accelerate.utils import is_peft_model
from torch import nn

from trl_qurl.quantization.checkpoint_form import CheckpointForm, expert_layers, parameter_name
from trl_qurl.quantization.plan import QuantizationPlan
from trl_qurl.quantization.rounded_base import check_unrounded
from trl_qurl.rollout.adapter import ENGINE_RANKS, adapted_layers, adapter_rank

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


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
    for path, layer in adapted_layers(model):
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


def choose_adapter(
    requested: str, obstacle: str | None, rank: int, served_rank: int | None, restart: str = ""
) -> tuple[bool, str]:
    """Choose whether to send an adapter without its base, and give the reason.

    `requested` is the config's `weight_sync`, `obstacle` why the adapter cannot be sent alone. A
    server accepts adapters up to `served_rank` (0: none), or larger ones once restarted with the
    command `restart`; `None` means a colocated engine. Raises `ValueError` if a requested adapter
    is not possible, and also for whole weights to a server that accepts adapters, because its
    layers are not the ones that whole weights are loaded into.
    """
    if obstacle is None and served_rank is not None and rank > served_rank:
        limit = f"only adapters up to rank {served_rank}" if served_rank else "no adapters"
        obstacle = (
            f"the server accepts {limit}, but this one has rank {rank}: start it with {restart}"
        )
    if requested == "adapter" and obstacle:
        raise ValueError(
            "An adapter alone (weight_sync='adapter', round_base=True) is not possible: "
            f"{obstacle}. Leave both settings out to send whole weights."
        )
    if requested == "adapter":
        return True, "weight_sync='adapter' requests it"
    if served_rank and (requested != "auto" or obstacle):
        raise ValueError(
            "The server accepts adapters (--enable-lora), but this run would send whole weights "
            f"({obstacle or f'weight_sync={requested!r}'}): start it without --enable-lora."
        )
    if served_rank:
        return True, "the server accepts adapters"
    return False, obstacle or "vLLM generates faster without one"
