"""Files in a checkpoint from which a run resumes inside a rollout.

One rollout serves several optimizer updates, but TRL keeps its tokens only in memory. A run that stops between two of
those updates would sample again on resuming and lose its place in the data. One small file per process prevents that.

Each epoch draws a new order from the same generator. A resumed process seeds it again, so it must redraw the orders of
completed epochs.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from trl.trainer.utils import RepeatSampler


def save_rollout_state(state: dict[str, Any], checkpoint: Path, accelerator: Accelerator) -> None:
    """Write this process's state into a checkpoint directory, complete or not at all."""
    path = _path(checkpoint, accelerator)
    checkpoint.mkdir(parents=True, exist_ok=True)
    torch.save(state | {"processes": accelerator.num_processes}, tmp := path.with_suffix(".tmp"))
    tmp.replace(path)


def load_rollout_state(checkpoint: Path, accelerator: Accelerator) -> dict[str, Any] | None:
    """Read this process's state; `None` if the checkpoint has none, or is from another number of processes."""
    path = _path(checkpoint, accelerator)
    if not path.exists():
        return None
    # Load via the CPU: torch cannot load directly to "cpu:0", the device of processes in a distributed CPU run.
    state = torch.load(path, map_location="cpu", weights_only=True)
    # Otherwise processes with a file would continue the rollout and draws of prompts, and those without start over.
    return send_to_device(state, accelerator.device) if state["processes"] == accelerator.num_processes else None


def skip_epochs(sampler: RepeatSampler | None, epoch: float | None) -> None:
    """Advance a shuffling sampler past the epochs already completed; other samplers need no change."""
    if sampler is not None and sampler.shuffle:
        for _ in range(int(epoch or 0)):
            next(iter(sampler))


def _path(checkpoint: Path, accelerator: Accelerator) -> Path:
    return checkpoint / f"rollout_state_{accelerator.process_index}.pt"
