"""The reference model of a KL penalty in checkpoints, because `sync_ref_model` changes it."""

from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

REFERENCE_FILE = "reference.pt"  # in a checkpoint


def save_reference(model: PreTrainedModel, accelerator: Accelerator, checkpoint: Path) -> None:
    """Add a reference model to a checkpoint. A collective operation."""
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.save(state, checkpoint / REFERENCE_FILE)


def load_reference(model: PreTrainedModel, accelerator: Accelerator, checkpoint: Path) -> None:
    """Load what `save_reference` wrote into a model that no launcher shards."""
    state = torch.load(checkpoint / REFERENCE_FILE, map_location="cpu", weights_only=True)
    accelerator.unwrap_model(model).load_state_dict(state)
