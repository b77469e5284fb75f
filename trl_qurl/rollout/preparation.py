"""The settings of rollouts, and what follows from them before an engine starts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, is_peft_model
from torch import nn
from transformers import PreTrainedModel
from trl.distributed import DistributedBackend

from trl_qurl.quantization.checkpoint_form import plain_model, policy_tensors
from trl_qurl.quantization.layers import model_layers
from trl_qurl.quantization.merging import on_grid
from trl_qurl.quantization.plan import Formats, QuantizationPlan, make_plan
from trl_qurl.quantization.smoothing import can_smooth
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.rollout.checks.hardware import EXPERTS, expert_obstacle

logger = get_logger(__name__)  # of the main process

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}  # by accelerate's `mixed_precision`


@dataclass(frozen=True)
class RolloutSettings:
    """The rollout settings of a trainer's config, as flat values.

    Config objects stop at the trainers.
    """

    formats: Formats  # of the rollout weights
    ignore: tuple[str, ...]  # patterns of modules kept in full precision
    is_served: bool  # whether the engine is a vLLM server
    weight_sync: str  # "auto", "stream", "checkpoint", "adapter" or "llmcompressor"
    round_base: bool  # whether to round the trainer's frozen base to its quantized values
    smooths: bool | None  # whether to smooth activations; `None` to do so where supported
    checkpoint_dir: str | None  # where to write checkpoints for the engine; `None` to choose
    engine_kwargs: dict[str, Any]  # extra arguments of the colocated engine
    seed: int  # of the noise that tokens are sampled with
    sync_check_interval: int  # syncs between proofs; 0 for none, and no digests
    request_timeout: float  # seconds that a request to a server may take
    listed: int = 0  # of the likeliest tokens, how many the engine returns per position


def prepare_weights(
    model: PreTrainedModel,
    rollout: RolloutSettings,
    accelerator: Accelerator,
    prompts: Callable[[], list[list[int]]],
) -> WeightStream:
    """Return the stream of weights to send.

    The stream is smoothed for the tokens of the first prompts where that is possible. `prompts`
    returns the tokens of a few, or none if they are not known yet. A collective operation. Raises
    `ValueError` as `check_policy` and `make_plan` do.
    """
    check_policy(plain_model(model))
    has_adapter = is_peft_model(model)
    smooths = rollout.smooths
    if smooths is None:  # smooth where supported, unless an adapter may be sent alone
        smooths = can_smooth(model) and not (rollout.is_served and has_adapter)
    weights = WeightStream(model, plan_rollouts(model, rollout), smooths)
    weights.grid = AUTOCAST.get(accelerator.mixed_precision)
    _fit_smoothing(weights, model, accelerator, prompts)
    return weights


def round_frozen_base(model: PreTrainedModel, grid: torch.dtype | None) -> None:
    """Round the weights below an adapter, in place, to the values that autocast uses.

    Autocast rounds them at every use, but a sync merges them with the adapter before it rounds.
    """
    for _, tensor in policy_tensors(model):
        if not tensor.requires_grad:
            tensor.data = on_grid(tensor.data, grid)


def _fit_smoothing(
    weights: WeightStream,
    model: PreTrainedModel,
    accelerator: Accelerator,
    prompts: Callable[[], list[list[int]]],
) -> None:
    """Smooth for the tokens of the first prompts, if the stream smooths.

    Without the prompts or the model, smoothing begins with the second rollout.
    """
    smoothing = weights.smoothing
    if smoothing is None:
        return
    # FSDP and DeepSpeed leave the model on the host for now, where one core would take minutes for
    # these passes.
    is_on_device = model.device.type == accelerator.device.type
    arrives_later = DistributedBackend(accelerator).is_zero3 or not is_on_device
    sequences = [] if arrives_later else prompts()
    if not sequences:
        logger.info(
            "Smoothing begins with the second rollout, because the model or its prompts come later."
        )
    # The main process fits, because others may not have loaded the weights.
    scales: dict[str, torch.Tensor] = {}
    if accelerator.is_main_process and sequences:
        weights.fit_smoothing(model, sequences)
        scales = {name: scale.cpu() for name, scale in smoothing.scales.items()}
    [smoothing.scales] = broadcast_object_list([scales], from_process=0)


def plan_rollouts(model: PreTrainedModel, rollout: RolloutSettings) -> QuantizationPlan:
    """Plan the formats of a model's layers, and log those that stay in 16 bits if not obvious.

    Experts that this machine's engine cannot run in the one format of all layers stay in 16 bits,
    with a warning. A server is started elsewhere, with its own `--ignore`.
    """
    plan = make_plan(model, rollout.formats, rollout.ignore)
    obstacle = None
    if isinstance(rollout.formats, str) and not rollout.is_served:
        obstacle = expert_obstacle(plain_model(model).config, plan.schemes)
    if obstacle is not None:
        ignore = [*rollout.ignore, EXPERTS]
        logger.warning(
            "%s, so they stay in 16 bits, as with quantization_ignore=%s.", obstacle, ignore
        )
        plan = make_plan(model, rollout.formats, ignore)
    left = [name for name in model_layers(model) if name not in plan.schemes]
    if isinstance(rollout.formats, Mapping) and left:
        shown = ", ".join(left[:8])
        if len(left) > 8:
            shown += ", ..."
        logger.info("%d layers stay in 16 bits: %s.", len(left), shown)
    return plan


def check_policy(model: PreTrainedModel) -> None:
    """Raise `ValueError` for a policy that an engine or transformers cannot hold as it is.

    An engine ties an output head and an embedding, even if the policy trains them apart, and
    transformers saves no model with a wrong generation config.
    """
    tied = model.all_tied_weights_keys
    if vars(model.config).get("tie_word_embeddings") and tied:
        head = model.get_output_embeddings()
        embedding = model.get_input_embeddings()
        is_apart = _trained_of(head) != _trained_of(embedding)
        if is_apart or head.weight is not embedding.weight:
            first, second = next(iter(tied.items()))
            raise ValueError(
                f"{first} and {second} are one tensor in the engine (tie_word_embeddings), but the "
                "policy trains them apart: leave both modules out of target_modules and "
                "modules_to_save, or save both with ensure_weight_tying=True, or untie the model "
                "first."
            )
    if model.generation_config is None:
        return
    try:
        model.generation_config.validate(strict=True)
    except ValueError as error:
        raise ValueError(
            "transformers saves no model with the generation_config.json of "
            f"{model.name_or_path or 'this one'}: correct it there, or in model.generation_config. "
            f"{error}"
        ) from None


def _trained_of(module: nn.Module) -> set[nn.Parameter]:
    """Return what is trained of a head or embedding, apart from a bias.

    That is the module's weight, an adapter, or a copy (`modules_to_save`).
    """
    return {
        parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name != "bias"
    }
