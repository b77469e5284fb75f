"""Trainer callbacks."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from trl_qurl.quantization.uaq import recorded_scale, scale_model_
from trl_qurl.rollout.group import TOGETHER
from trl_qurl.trainers.run_log import RUN_LOG, append_row, begin_log, end_log


class UpdateAwareQuantizationCallback(TrainerCallback):
    """A `TrainerCallback` that applies UAQ to the model once, when the trainer is built.

    Source: Eq. 10-12 of QuRL, arXiv:2602.13953; s = 1.5 is best in its Table 4.

    No model is scaled twice: its config records the scale, and a resumed run overwrites weights
    scaled at init with the checkpoint's scaled weights.

    Args:
        scale: The factor s applied to the norms' gains.
    """

    def __init__(self, scale: float = 1.5) -> None:
        self.scale = scale

    def on_init_end(self, *args: object, model: PreTrainedModel, **kwargs: object) -> None:
        """Scale the model before it is wrapped, optimized or overwritten by a checkpoint."""
        scale_model_(model, self.scale)

    def on_train_begin(self, *args: object, model: PreTrainedModel, **kwargs: object) -> None:
        """Raise `RuntimeError` if the model was never scaled."""
        scale = recorded_scale(model)
        if scale != self.scale:
            raise RuntimeError(
                f"UAQ scale {self.scale} was requested, but the model being trained has scale "
                f"{scale}: pass the callback in callbacks=[...], and a model instead of model_init."
            )


class TrainerAwareCallback(TrainerCallback):
    """Base class for callbacks that need their trainer, which transformers does not pass to them.

    trl-qurl's trainers set `trainer` when they take a callback in `callbacks=[...]` or
    `add_callback`.
    """

    trainer: Any  # a weak proxy, so deleting a trainer frees its engine


class SavingBetweenSteps(TrainerAwareCallback):
    """Callback that moves a checkpoint that is saved inside a step to the step's end.

    `enable_jit_checkpoint` saves before the optimizer's step, but a rollout's micro-batches count
    as used by then, and PPO's critic has stepped.
    """

    def __init__(self) -> None:
        self._is_inside = False  # a step
        self._moved: Path | None = None  # where the checkpoint would have been

    def moves(self, checkpoint: Path) -> bool:
        """Note that a checkpoint is to be saved now, if that is inside a step.

        Args:
            checkpoint: Where it is to be saved.

        Returns:
            Whether it has to wait for the end of the step.
        """
        if self._is_inside:
            self._moved = checkpoint
        return self._is_inside

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        """Forget a step that was interrupted."""
        self._is_inside = False

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        """Note that a step has begun."""
        self._is_inside = True

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Save what was to be saved inside the step."""
        self._is_inside = False
        if self._moved is None:
            return
        control.should_save = True
        if args.should_save:
            with suppress(OSError):
                self._moved.rmdir()  # transformers has made it, and left it empty
        self._moved = None


class RunLogCallback(TrainerCallback):
    """A `TrainerCallback` that writes `run.jsonl`, the input of `trl-qurl report`.

    Only the main process writes.

    Args:
        settings: Settings to write in addition to the trainer's arguments, by name.
    """

    def __init__(self, settings: dict[str, object] | None = None) -> None:
        self._settings = settings or {}
        self._path: Path | None = None  # of the log, in the process that writes it

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: PreTrainedModel,
        **kwargs: object,
    ) -> None:
        """Start the file in the output directory, with the rows of a checkpoint to resume from.

        A collective operation. Raises `RuntimeError` in all processes if another run is training
        there.
        """
        settings = {
            "model": getattr(model.config, "_name_or_path", None),
            **args.to_dict(),
            "uaq_scale": recorded_scale(model),
            **self._settings,
        }
        path = Path(args.output_dir or ".") / RUN_LOG
        TOGETHER.from_main(lambda: begin_log(path, settings, state.log_history))
        if state.is_world_process_zero:
            self._path = path

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, float],
        **kwargs: object,
    ) -> None:
        """Append the row, unless the trainer evaluates without having trained."""
        if self._path is not None:
            append_row(self._path, {"step": state.global_step, **logs})

    def close(self) -> None:
        """Let other runs use the output directory."""
        if self._path is not None:
            end_log(self._path)
