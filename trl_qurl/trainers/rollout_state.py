"""The rollout in progress, kept in checkpoints so that a resumed run continues inside it.

One rollout serves several optimizer updates. TRL keeps its tokens in memory only: a run that stops between two of
those updates would sample anew on resuming and lose its place in the data. One small file per process prevents that.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device


class RolloutState(NamedTuple):
    """Where a trainer stands within a rollout: micro-batches done so far, and the batches still to be learned from."""

    step: int
    batches: list[dict[str, Any]] | None


def save_rollout_state(state: RolloutState, checkpoint: str | os.PathLike[str], process_index: int) -> None:
    """Write one process's state into a checkpoint directory; a half-written file never has the final name."""
    path = _path(checkpoint, process_index)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    torch.save(state._asdict(), draft)
    os.replace(draft, path)


def load_rollout_state(
    checkpoint: str | os.PathLike[str], process_index: int, device: torch.device
) -> RolloutState | None:
    """Read it back; `None` for a checkpoint without one (made by another trainer, or by more processes)."""
    path = _path(checkpoint, process_index)
    if not path.exists():
        return None
    # By way of the CPU: torch cannot load straight to "cpu:0", the device of one process among several on CPU.
    state = RolloutState(**torch.load(path, map_location="cpu", weights_only=True))
    return RolloutState(state.step, send_to_device(state.batches, device))


def _path(checkpoint: str | os.PathLike[str], process_index: int) -> Path:
    return Path(checkpoint) / f"rollout_state_{process_index}.pt"
