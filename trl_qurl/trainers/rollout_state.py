"""Files in a checkpoint from which a run resumes inside a rollout.

One rollout serves several optimizer updates, but TRL keeps its tokens only in memory. A run that stops between two of
those updates would sample again on resuming and lose its place in the data. One small file per process prevents that.

Each epoch draws a new order from the same generator. A resumed process seeds it again, so it must redraw the orders of
completed epochs.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from trl.trainer.utils import RepeatSampler


def save_rollout_state(state: dict[str, Any], checkpoint: Path, process_index: int) -> None:
    """Write one process's state into a checkpoint directory."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    torch.save(state, _path(checkpoint, process_index))


def load_rollout_state(checkpoint: Path, process_index: int, device: torch.device) -> dict[str, Any] | None:
    """Read one process's state; `None` if the checkpoint has none (another trainer, or fewer processes)."""
    path = _path(checkpoint, process_index)
    if not path.exists():
        return None
    # Load via the CPU: torch cannot load directly to "cpu:0", the device of processes in a distributed CPU run.
    return send_to_device(torch.load(path, map_location="cpu", weights_only=True), device)


def skip_epochs(sampler: RepeatSampler | None, epoch: float | None) -> None:
    """Advance a shuffling sampler past the epochs already completed; other samplers need no change."""
    if sampler is not None and sampler.shuffle:
        for _ in range(int(epoch or 0)):
            next(iter(sampler))


def _path(checkpoint: Path, process_index: int) -> Path:
    return checkpoint / f"rollout_state_{process_index}.pt"
