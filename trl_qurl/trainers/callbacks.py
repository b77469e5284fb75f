"""Trainer callbacks."""

import weakref
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, TrainerCallback, TrainerState, TrainingArguments

from trl_qurl.quantization.uaq import recorded_scale, scale_model_
from trl_qurl.trainers.run_log import RUN_LOG, append_row, begin_log


class UpdateAwareQuantizationCallback(TrainerCallback):
    """A `TrainerCallback` that applies UAQ to the model once, when the trainer is built.

    Source: Eq. 10-12 of QuRL, arXiv:2602.13953; s = 1.5 is best in its Table 4.

    No model is scaled twice: its config records the scale, and a resumed run overwrites weights scaled at init with
    the checkpoint's scaled weights.

    Args:
        scale: The factor s applied to the norms' gains.
    """

    def __init__(self, scale: float = 1.5) -> None:
        self.scale = scale

    def on_init_end(self, *args: Any, model: PreTrainedModel, **kwargs: Any) -> None:
        """Scale the model before it is wrapped, added to an optimizer or overwritten by a checkpoint."""
        scale_model_(model, self.scale)

    def on_train_begin(self, *args: Any, model: PreTrainedModel, **kwargs: Any) -> None:
        """Raise `RuntimeError` if the model was never scaled."""
        if recorded_scale(model) != self.scale:
            raise RuntimeError(
                f"UAQ scale {self.scale} was requested, but the model being trained has scale "
                f"{recorded_scale(model)}. The callback runs when the trainer is built: pass it in callbacks=[...], "
                "and pass a model, not model_init."
            )


class TrainerAwareCallback(TrainerCallback):
    """Base class for callbacks that need their trainer, which transformers does not pass to them.

    trl-qurl's trainers set `trainer`. The reference is weak, so deleting a trainer frees its engine.
    """

    _trainer: weakref.ref | None = None

    @property
    def trainer(self) -> Any:
        """The trainer that this callback was passed to; a `RuntimeError` if there is none."""
        trainer = None if self._trainer is None else self._trainer()
        if trainer is None:
            name = type(self).__name__
            raise RuntimeError(f"{name} has no trainer: pass it in callbacks=[...] to a trl-qurl trainer.")
        return trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)


class RunLogCallback(TrainerCallback):
    """A `TrainerCallback` that writes `run.jsonl`, the input of `trl-qurl report`, in the main process.

    Args:
        settings: Settings to write in addition to the trainer's arguments, by name.
    """

    def __init__(self, settings: dict[str, object] | None = None) -> None:
        self._settings = settings or {}
        self._path: Path | None = None  # of the log, in the process that writes it

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: Any, *, model: PreTrainedModel, **kwargs: Any
    ) -> None:
        """Start the file in the output directory, or continue it after the step that training resumes from."""
        if state.is_world_process_zero:
            name = getattr(model.config, "_name_or_path", None)
            settings = {"model": name, **args.to_dict(), "uaq_scale": recorded_scale(model), **self._settings}
            self._path = Path(args.output_dir or ".") / RUN_LOG
            begin_log(self._path, settings, state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: Any, *, logs: dict[str, float], **kwargs: Any) -> None:
        """Append the row, unless the trainer evaluates without having trained."""
        if self._path is not None:
            append_row(self._path, {"step": state.global_step, **logs})
