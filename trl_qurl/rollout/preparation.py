"""What is decided before an engine starts: the layers that are quantized, and how their activations are smoothed.

Both look at the tokens of a few prompts. Only the main process does, because others may not have loaded the weights.
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
from trl_qurl.quantization.weight_stream import WeightStream
from trl_qurl.rollout.settings import RolloutSettings

logger = get_logger(__name__)  # of the main process

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What the trainer computes with, by accelerate's `mixed_precision`."""


def prepare_weights(
    model: Any, rollout: RolloutSettings, accelerator: Accelerator, prompts: Callable[[], list[list[int]]]
) -> tuple[WeightStream, tuple[str, ...]]:
    """The weights as they will be sent. A collective operation.

    Args:
        model: The policy.
        rollout: Settings; `AUTO` among the ignored modules is replaced by layers.
        accelerator: Of the processes that share the policy.
        prompts: Gives the tokens of a few prompts; none where they are not known yet.

    Returns:
        The stream, and the layers that `AUTO` has left in full precision.

    Raises:
        ValueError: `AUTO` has nothing to choose by.
    """
    ignore = ignored_modules(model, [pattern for pattern in rollout.ignore if pattern != AUTO])
    weights = WeightStream(model, rollout.scheme, ignore, _smooths(model, rollout))
    # An adapter beside its base is not rounded with it, and the quantized forward pass rounds float32 weights.
    if rollout.follows_autocast and not is_peft_model(model):
        weights.grid = AUTOCAST.get(accelerator.mixed_precision)
    chooses = AUTO in rollout.ignore and rollout.scheme is not None
    if weights.smoothing is None and not chooses:
        return weights, ()
    sequences = [] if DistributedBackend(accelerator).is_zero3 else prompts()
    if chooses and not sequences:  # smoothing would begin with the second rollout
        raise ValueError(
            "quantization_ignore='auto' needs whole weights and prompts of text when the engine starts, and here "
            "ZeRO-3 shards the weights, or prompts have pictures or environments: run `trl-qurl mismatch MODEL "
            "--kl 5e-3` and give the list that it writes."
        )
    found: list[Any] = [({}, ())]
    if accelerator.is_main_process and sequences:
        if weights.smoothing is not None:
            weights.fit_smoothing(model, sequences)
        kept = sensitive_layers(model, weights, sequences) if chooses else ()
        scales = {} if weights.smoothing is None else weights.smoothing.scales
        found = [({name: scale.cpu() for name, scale in scales.items()}, kept)]
    broadcast_object_list(found, from_process=0)
    scales, kept = found[0]
    if weights.smoothing is not None:
        weights.smoothing.scales = scales
    if chooses:
        weights.keep(kept)
        logger.info("Kept in 16 bits: %s.", ", ".join(kept) or "no further layers")
    return weights, kept


def _smooths(model: Any, rollout: RolloutSettings) -> bool:
    """Whether activations are smoothed: where it is known how, unless an adapter may travel by itself."""
    if rollout.smooths is not None:
        return rollout.smooths
    return can_smooth(model) and not (rollout.is_served and is_peft_model(model))
