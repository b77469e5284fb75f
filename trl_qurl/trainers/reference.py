"""The reference model of a KL penalty.

TRL loads it by the policy's name, and `sync_ref_model` changes it.
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from transformers import PreTrainedModel

from trl_qurl.quantization.uaq import recorded_scale
from trl_qurl.trainers.resuming import is_sharded

logger = get_logger(__name__)  # logs in the main process only

REFERENCE_FILE = "reference.pt"  # in a checkpoint


def warn_of_another_reference(
    policy: PreTrainedModel, reference: PreTrainedModel, accelerator: Accelerator
) -> None:
    """Warn if a new run's policy is not its own reference, as after a merge in memory."""
    if is_sharded(accelerator):  # parts cannot be compared
        return
    if recorded_scale(policy) != 1.0:  # UAQ rescales the policy alone, which changes no output
        return
    others = dict(accelerator.unwrap_model(reference).named_parameters())
    for name, parameter in policy.named_parameters():
        other = others.get(name)
        if other is None or not _is_equal(parameter.detach(), other.detach()):
            source = policy.config._name_or_path
            logger.warning(
                f"The reference model of the KL penalty (beta) is the one that {source!r} names, "
                f"and differs from the policy (first in {name}): the penalty pulls the policy "
                "towards it. If you have changed the policy in memory, as by merging an adapter, "
                "save it and pass its directory as the model."
            )
            return


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare two tensors in the coarser of their types."""
    dtype = min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(one.to(dtype), other.to(one.device, dtype))


def save_reference(model: PreTrainedModel, accelerator: Accelerator, checkpoint: Path) -> None:
    """Add a reference model that changes (`sync_ref_model`) to a checkpoint.

    A collective operation.
    """
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        checkpoint.mkdir(parents=True, exist_ok=True)
        torch.save(state, checkpoint / REFERENCE_FILE)


def load_reference(model: PreTrainedModel, accelerator: Accelerator, checkpoint: Path) -> None:
    """Load what `save_reference` wrote.

    Raises `ValueError` if it is missing, or the model is sharded.
    """
    path = checkpoint / REFERENCE_FILE
    reason = ""
    if not path.is_file():
        reason = f"{checkpoint} does not hold it"
    elif is_sharded(accelerator):
        launcher = accelerator.distributed_type.value
        reason = f"a reference model that {launcher} shards cannot be loaded"
    if reason:
        raise ValueError(
            f"sync_ref_model=True has changed the reference model, and {reason}: set "
            "sync_ref_model=False, or start a new run from the saved policy."
        )
    state = torch.load(path, map_location="cpu", weights_only=True)
    accelerator.unwrap_model(model).load_state_dict(state)
