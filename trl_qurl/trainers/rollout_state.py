"""Checkpoints that keep a run's position in its rollout and in its data, so that a resumed run continues there.

The history of the mismatch guard and the scales of smoothing are kept beside it.

One rollout serves several optimizer updates. TRL keeps its tokens in memory only: a run that stops between two of
those updates would sample again on resuming and lose its place in the data. One small file per process prevents that.

Each epoch has an order of its own, drawn from one generator, which is seeded again in the resumed process, so
the orders of the epochs that are over must be drawn again there.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list, send_to_device
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.trainer.utils import RepeatSampler

from trl_qurl.trainers.guard import MismatchGuardCallback

if TYPE_CHECKING:
    from trl import GRPOTrainer as TRLTrainer
else:
    TRLTrainer = object


class RolloutStateMixin(TRLTrainer):
    """A mixin for a trainer of TRL: its checkpoints hold the rollout in progress, and it resumes inside of it."""

    _train_sampler: RepeatSampler | None = None
    _guard: MismatchGuardCallback | None = None  # `None` if it is off

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        checkpoint = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        # Micro-batches done so far, and the batches that are left of the rollout.
        guard = self._guard and self._guard.state_dict()
        smoothing = self.vllm_generation.weights.smoothing
        state = {"step": self._step, "batches": self._buffered_inputs, "guard": guard}
        state["smoothing"] = smoothing and smoothing.state_dict()
        save_rollout_state(state, checkpoint, self.accelerator.process_index)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        skip_epochs(self._train_sampler, self.state.epoch)  # the state is the checkpoint's by now
        state = load_rollout_state(Path(checkpoint), self.accelerator.process_index, self.accelerator.device)
        if state is not None:
            self._step, self._buffered_inputs = state["step"], state["batches"]
            smoothing = self.vllm_generation.weights.smoothing
            if smoothing is not None and state.get("smoothing"):
                smoothing.load_state_dict(state["smoothing"])
        if self._guard is not None:
            # All processes fall back together, also those that the checkpoint has no file of.
            kept = [state and state["guard"]]
            broadcast_object_list(kept, from_process=0)
            self._guard.load_state_dict(kept[0])


def save_rollout_state(state: dict[str, Any], checkpoint: Path, process_index: int) -> None:
    """Write one process's state into a checkpoint directory; a half-written file never has the final name."""
    path = _path(checkpoint, process_index)
    checkpoint.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    torch.save(state, draft)
    os.replace(draft, path)


def load_rollout_state(checkpoint: Path, process_index: int, device: torch.device) -> dict[str, Any] | None:
    """Read it back; `None` for a checkpoint without one (made by another trainer, or by fewer processes)."""
    path = _path(checkpoint, process_index)
    if not path.exists():
        return None
    # Via the CPU: torch cannot load straight to "cpu:0", the device of one process among several on CPU.
    return send_to_device(torch.load(path, map_location="cpu", weights_only=True), device)


def skip_epochs(sampler: RepeatSampler | None, epoch: float | None) -> None:
    """Let a sampler draw and forget the orders of epochs that are over; nothing without a sampler, or a shuffle."""
    if sampler is not None and sampler.shuffle:
        for _ in range(int(epoch or 0)):
            next(iter(sampler))


def _path(checkpoint: Path, process_index: int) -> Path:
    return checkpoint / f"rollout_state_{process_index}.pt"
