"""Loads what transformers would miss when a run resumes; `checks/resuming.py` proves the rest."""

from collections.abc import Iterator
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import DistributedType, is_peft_model
from transformers import PreTrainedModel

from trl_qurl.quantization.checkpoint_form import CheckpointForm

ADAPTER_FILE = "adapter_model.safetensors"


def is_sharded(accelerator: Accelerator) -> bool:
    """Return whether the processes hold parts of a prepared model's parameters."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


def load_policy(model: PreTrainedModel, checkpoint: Path) -> bool:
    """Load what transformers' loader would miss; return whether the policy is loaded.

    It would miss the adapter of a policy whose checkpoint has others beside it, and parameters that
    the checkpoint names or cuts differently. `model` must be whole in this process.
    """
    if is_peft_model(model):
        return _load_adapters(model, checkpoint)
    if not (checkpoint / "config.json").is_file() or not _is_converted(model):
        return False
    loaded = type(model).from_pretrained(checkpoint, dtype=model.dtype)
    model.load_state_dict(loaded.state_dict())
    return True


def _load_adapters(model: PreTrainedModel, checkpoint: Path) -> bool:
    """Load each of a policy's adapters from where PEFT saves it, and no others."""
    found = dict(saved_adapters(model, checkpoint))
    active = model.active_adapters[0]
    if active not in found:
        return False
    for name, path in found.items():
        model.load_adapter(str(path), name, is_trainable=(name == active))
    model.set_adapter(active)
    return True


def saved_adapters(model: PreTrainedModel, checkpoint: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names and directories of those of a policy's adapters that a checkpoint holds.

    PEFT saves the one named `default` in the root.
    """
    for name in model.peft_config:
        directory = checkpoint if name == "default" else checkpoint / name
        if (directory / ADAPTER_FILE).is_file():
            yield name, directory


def _is_converted(model: PreTrainedModel) -> bool:
    """Return whether a checkpoint stores some parameter under another name, or in several parts."""
    layout = CheckpointForm(model, splits_experts=False).layout
    return any(list(stored) != [name] for name, stored in layout.items())
