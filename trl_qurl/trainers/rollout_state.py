"""Checkpoints that store a run's position in its rollout and in its data, to resume exactly there.

They also store the smoothing scales.

One rollout serves several optimizer updates, but TRL keeps its tokens only in memory. A run that stops between two of
those updates would sample again on resuming and lose its place in the data. One small file per process prevents that.

Each epoch draws a new order from the same generator. A resumed process seeds it again, so it must redraw the orders of
completed epochs.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.trainer.utils import RepeatSampler

if TYPE_CHECKING:
    from trl import GRPOTrainer as TRLTrainer
else:
    TRLTrainer = object


class RolloutStateMixin(TRLTrainer):
    """Mixin for TRL trainers that saves the rollout in progress in checkpoints and resumes inside it."""

    _train_sampler: RepeatSampler | None = None

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        checkpoint = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        smoothing = self.vllm_generation.weights.smoothing
        # TRL's count of micro-batches so far, and the batches of its rollout.
        state = {"step": self._step, "batches": self._buffered_inputs}
        state["smoothing"] = smoothing and smoothing.state_dict()
        save_rollout_state(state, checkpoint, self.accelerator.process_index)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        skip_epochs(self._train_sampler, self.state.epoch)  # `self.state` is the checkpoint's by now
        state = load_rollout_state(Path(checkpoint), self.accelerator.process_index, self.accelerator.device)
        if state is not None:
            self._step, self._buffered_inputs = state["step"], state["batches"]
            smoothing = self.vllm_generation.weights.smoothing
            if smoothing is not None and state.get("smoothing"):
                smoothing.load_state_dict(state["smoothing"])


def save_rollout_state(state: dict[str, Any], checkpoint: Path, process_index: int) -> None:
    """Write one process's state into a checkpoint directory, atomically."""
    path = _path(checkpoint, process_index)
    checkpoint.mkdir(parents=True, exist_ok=True)
    tmp = path.with_suffix(".tmp")
    torch.save(state, tmp)
    os.replace(tmp, path)


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
