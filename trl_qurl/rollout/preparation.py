"""Choose the layers to quantize and how to smooth their activations, before an engine starts.

Both need the tokens of a few prompts. Only the main process chooses, because others may not have loaded the weights.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, is_peft_model
from trl.distributed import DistributedBackend

from trl_qurl.quantization.layers import AUTO, ignored_modules
from trl_qurl.quantization.sensitivity import sensitive_layers
from trl_qurl.quantization.smoothing import can_smooth
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.rollout.settings import RolloutSettings

logger = get_logger(__name__)  # of the main process

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The trainer's compute dtype, by accelerate's `mixed_precision`."""


def prepare_weights(
    model: Any, rollout: RolloutSettings, accelerator: Accelerator, prompts: Callable[[], list[list[int]]]
) -> tuple[WeightStream, tuple[str, ...]]:
    """Prepare the stream of weights to send. A collective operation.

    Args:
        model: The policy.
        rollout: Settings; `AUTO` among the ignored modules is replaced with layers.
        accelerator: Accelerator of the processes that share the policy.
        prompts: Returns the tokens of a few prompts; empty if they are not known yet.

    Returns:
        The stream, and the layers that `AUTO` keeps in full precision.

    Raises:
        ValueError: `AUTO` has no whole weights or no prompts to choose by.
    """
    ignore = ignored_modules(model, [pattern for pattern in rollout.ignore if pattern != AUTO])
    weights = WeightStream(model, rollout.scheme, ignore, _smooths(model, rollout))
    if not is_peft_model(model):  # an adapter is not rounded with its base
        weights.grid = AUTOCAST.get(accelerator.mixed_precision)
    is_auto = AUTO in rollout.ignore and rollout.scheme is not None
    if weights.smoothing is None and not is_auto:
        return weights, ()
    sequences = [] if DistributedBackend(accelerator).is_zero3 else prompts()
    if is_auto and not sequences:  # smoothing alone could begin with the second rollout
        raise ValueError(
            "quantization_ignore='auto' needs whole weights and text prompts when the engine starts, but here "
            "ZeRO-3 shards the weights, or prompts have images or environments: run `trl-qurl mismatch MODEL "
            "--kl 5e-3` and pass the list that it writes."
        )
    choice: list[Any] = [{}, ()]
    if accelerator.is_main_process and sequences:
        if weights.smoothing is not None:
            weights.fit_smoothing(model, sequences)
            choice[0] = {name: scale.cpu() for name, scale in weights.smoothing.scales.items()}
        if is_auto:
            choice[1] = sensitive_layers(model, weights, sequences)
    scales, layers = broadcast_object_list(choice, from_process=0)
    if weights.smoothing is not None:
        weights.smoothing.scales = scales
    if is_auto:
        weights.keep(layers)
        logger.info("Kept in 16 bits: %s.", ", ".join(layers) or "no additional layers")
    return weights, layers


def _smooths(model: Any, rollout: RolloutSettings) -> bool:
    """Return whether to smooth activations: by default where supported, unless an adapter may be sent alone."""
    if rollout.smooths is not None:
        return rollout.smooths
    return can_smooth(model) and not (rollout.is_served and is_peft_model(model))
