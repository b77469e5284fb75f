"""Trainer callbacks."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from trl_qurl.quantization.plan import format_name
from trl_qurl.quantization.uaq import recorded_scale, scale_model_
from trl_qurl.rollout.group import TOGETHER
from trl_qurl.trainers.run_log import RUN_LOG, append_row, begin_log, end_log
from trl_qurl.trainers.scoring import Rollout


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


class RolloutCallback(TrainerCallback):
    """Base class for callbacks that need their trainer, or an event that transformers lacks.

    trl-qurl's trainers set `trainer` for a callback in `callbacks=[...]` or `add_callback`, and
    call these methods in all processes. One that is added later gets the last two only. An error
    ends the run; raise it in all processes or none.
    """

    trainer: Any  # a weak proxy, so deleting a trainer frees its engine

    def record(self, metrics: dict[str, float]) -> None:
        """Log numbers with those of the trainer, as means until the next row.

        Args:
            metrics: By name.
        """
        self.trainer._record(metrics)

    def on_arguments(self, args: TrainingArguments, arguments: dict[str, Any]) -> None:
        """Read the config and the constructor's arguments, by TRL's names.

        Nothing is loaded, and `trainer` has no attributes yet.
        """

    def on_models(self) -> None:
        """Read the model, the tokenizer and the data, which TRL has loaded; there is no engine."""

    def on_engine(self) -> None:
        """Read what the engine has said of itself (`trainer.vllm_generation`)."""

    def on_scored(self, metrics: Mapping[str, float]) -> None:
        """Read how far a rollout is from the policy (`mismatch/*`), before the policy changes.

        It comes before `on_rollout` if a pass in advance scores the rollout, else inside its last
        micro-batch; never for a trainer that scores no rollouts.
        """

    def on_rollout(self, rollout: Rollout) -> None:
        """Read a rollout, before anything is learned from it.

        Also one of an evaluation: then `trainer.model.training` is False. A run that resumes inside
        a rollout gets the next one.
        """


class RunLogCallback(TrainerCallback):
    """A `TrainerCallback` that prints what a run will do, and writes `run.jsonl`.

    `trl-qurl report` reads that file. Only the main process prints and writes.

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
            if "objective" in settings:  # as in our configs of groups
                print(_plan(args, state.max_steps), flush=True)

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


def _plan(args: Any, steps: int) -> str:
    """Summarize a run in two lines, from its config and its number of optimizer steps."""
    formats = args.rollout_quantization
    name = "16-bit" if formats is None else format_name(formats).upper()
    answers = args.generation_batch_size
    questions = answers // args.num_generations
    updates = args.updates_per_rollout
    rollouts = f"{math.ceil(steps / updates)} {name} rollouts of {answers} answers"
    return (
        f"{steps} steps: {rollouts} (questions x answers: {questions} x {args.num_generations}),\n"
        f"up to {args.max_completion_length} tokens, updates each: {updates:g} ({args.objective})"
    )
