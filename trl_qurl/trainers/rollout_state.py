"""Checkpoints that keep a run's position in its rollout and in its data, so that a resumed run continues there.

One rollout serves several optimizer updates. TRL keeps its tokens in memory only: a run that stops between two of
those updates would sample again on resuming and lose its place in the data. One small file per process prevents that.

Each epoch has an order of its own, drawn from one generator, which is seeded again in the resumed process, so
the orders of the epochs that are over must be drawn again there.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.trainer.utils import RepeatSampler

if TYPE_CHECKING:
    from trl import GRPOTrainer as TRLTrainer
else:
    TRLTrainer = object


class RolloutState(NamedTuple):
    """A position within a rollout."""

    step: int  # micro-batches done so far
    batches: list[dict[str, Any]] | None  # that remain


class RolloutStateMixin(TRLTrainer):
    """A mixin for a trainer of TRL: its checkpoints hold the rollout in progress, and it resumes inside of it."""

    _train_sampler: RepeatSampler | None = None

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        checkpoint = f"{self._get_output_dir(trial=trial)}/{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        state = RolloutState(self._step, self._buffered_inputs)
        save_rollout_state(state, checkpoint, self.accelerator.process_index)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        skip_epochs(self._train_sampler, epochs_done(checkpoint))
        state = load_rollout_state(checkpoint, self.accelerator.process_index, self.accelerator.device)
        if state is not None:
            self._step, self._buffered_inputs = state


def save_rollout_state(state: RolloutState, checkpoint: str | Path, process_index: int) -> None:
    """Write one process's state into a checkpoint directory; a half-written file never has the final name."""
    path = _path(checkpoint, process_index)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    torch.save(state._asdict(), draft)
    os.replace(draft, path)


def load_rollout_state(checkpoint: str | Path, process_index: int, device: torch.device) -> RolloutState | None:
    """Read it back; `None` for a checkpoint without one (made by another trainer, or by fewer processes)."""
    path = _path(checkpoint, process_index)
    if not path.exists():
        return None
    # Via the CPU: torch cannot load straight to "cpu:0", the device of one process among several on CPU.
    state = RolloutState(**torch.load(path, map_location="cpu", weights_only=True))
    return state._replace(batches=send_to_device(state.batches, device))


def epochs_done(checkpoint: str | Path) -> int:
    """Whole epochs that were over when the checkpoint was written."""
    return int(TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME)).epoch or 0)


def skip_epochs(sampler: RepeatSampler | None, epochs: int) -> None:
    """Let a sampler draw and forget the orders of epochs that are over; nothing without a sampler, or a shuffle."""
    if sampler is not None and sampler.shuffle:
        for _ in range(epochs):
            next(iter(sampler))


def _path(checkpoint: str | Path, process_index: int) -> Path:
    return Path(checkpoint) / f"rollout_state_{process_index}.pt"
