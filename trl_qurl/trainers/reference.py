"""The reference model of a KL penalty in checkpoints, because `sync_ref_model` changes it."""

from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from trl_qurl.trainers.resuming import is_sharded

REFERENCE_FILE = "reference.pt"  # in a checkpoint


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
