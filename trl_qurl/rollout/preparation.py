"""The settings of rollouts, and what follows from them before an engine starts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, is_peft_model
from transformers import PreTrainedModel
from trl.distributed import DistributedBackend

from trl_qurl.quantization.checkpoint_form import plain_model, policy_tensors
from trl_qurl.quantization.merging import on_grid
from trl_qurl.quantization.plan import Formats, QuantizationPlan, make_plan
from trl_qurl.quantization.smoothing import can_smooth
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.rollout.checks.hardware import EXPERTS, expert_obstacle
from trl_qurl.rollout.checks.tied_head import check_tied_head

logger = get_logger(__name__)  # of the main process

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}  # by accelerate's `mixed_precision`


@dataclass(frozen=True)
class RolloutSettings:
    """Settings that rollouts take from a trainer's config, under the same names.

    The config's docstring describes them. Config objects stop at the trainers.
    """

    rollout_quantization: Formats
    quantization_ignore: list[str]
    vllm_mode: str
    weight_sync: str
    round_base: bool
    smooths: bool | None  # `None` to smooth where supported
    rollout_checkpoint_dir: str | None
    vllm_engine_kwargs: dict[str, Any]
    seed: int  # of the noise that tokens are sampled with
    sync_check_interval: int
    vllm_request_timeout: float
    listed: int = 0  # of the likeliest tokens, how many the engine returns per position

    @property
    def is_served(self) -> bool:
        """Whether the engine is a vLLM server."""
        return self.vllm_mode == "server"


def prepare_weights(
    model: PreTrainedModel,
    rollout: RolloutSettings,
    accelerator: Accelerator,
    prompts: Callable[[], list[list[int]]],
) -> WeightStream:
    """Return the stream of weights to send.

    The stream is smoothed for the tokens of the first prompts where that is possible. `prompts`
    returns the tokens of a few, or none if they are not known yet. A collective operation. Raises
    `ValueError` as `check_tied_head` and `make_plan` do.
    """
    check_tied_head(plain_model(model))
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
    [scales] = broadcast_object_list([scales], from_process=0)
    smoothing.scales = {name: scale.to(accelerator.device) for name, scale in scales.items()}


def plan_rollouts(model: PreTrainedModel, rollout: RolloutSettings) -> QuantizationPlan:
    """Plan the formats of a model's layers.

    Experts that this machine's engine cannot run in the one format of all layers stay in 16 bits,
    with a warning. A server is started elsewhere, with its own `--ignore`.
    """
    plan = make_plan(model, rollout.rollout_quantization, rollout.quantization_ignore)
    obstacle = None
    if isinstance(rollout.rollout_quantization, str) and not rollout.is_served:
        obstacle = expert_obstacle(plain_model(model).config, plan.schemes)
    if obstacle is not None:
        ignore = [*rollout.quantization_ignore, EXPERTS]
        logger.warning(
            "%s, so they stay in 16 bits, as with quantization_ignore=%s.", obstacle, ignore
        )
        plan = make_plan(model, rollout.rollout_quantization, ignore)
    return plan
