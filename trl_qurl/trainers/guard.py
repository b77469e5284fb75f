"""What is done when the sampling policy drifts from the learning one: a warning, a stop, or a fallback to 16 bits.

`rollout/guard.py` says when. It sees metrics that all processes share, so all of them act at the same step.
"""

from collections.abc import Mapping
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerControl, TrainerState, TrainingArguments

from trl_qurl.rollout.guard import ALARM, FALLEN_BACK, GUARD, QUIET, WINDOW, Finding, MismatchGuard
from trl_qurl.trainers.callbacks import TrainerAwareCallback

logger = get_logger(__name__)  # of the main process

JUDGED_UNDER = (
    "rollout_quantization",
    "quantization_ignore",
    "training_forward",
    "round_base",
    "vllm_engine_kwargs",
    "objective",
    "vllm_importance_sampling_clip_max",
    "learning_rate",
    "mismatch_guard",
    "mismatch_guard_kl",
)
"""Settings under which rollouts were judged. A run that resumes with others is judged anew."""

ADVICE = (
    "Correct for the difference (objective='tis' or 'acr'), use a finer rollout_quantization, or keep sensitive "
    "layers in 16 bits (`trl-qurl mismatch CHECKPOINT --kl 1e-3` lists them for quantization_ignore)."
)
ADVICE_WITHOUT_ROUNDING = (
    "Both policies have the same weights here, so rounding them is not the cause: look at the engine's settings "
    "(kv_cache_dtype, dtype), and at sampling settings that the policy does not have (top_p, top_k)."
)


class MismatchGuardCallback(TrainerAwareCallback):
    """Shows each training rollout's mismatch to a [`MismatchGuard`], and acts between two optimizer steps.

    Args:
        args: Config of the trainer, with `mismatch_guard` other than `off`.
    """

    def __init__(self, args: Any) -> None:
        self._action: str = args.mismatch_guard
        self._settings = {name: str(getattr(args, name, None)) for name in JUDGED_UNDER}
        learns_rounded = args.training_forward == "quantized" or args.round_base
        self._differ_by_rounding = args.rollout_quantization is not None and not learns_rounded
        self._guard = MismatchGuard(args.mismatch_guard_kl, getattr(args, "vllm_importance_sampling_clip_max", None))
        self.fallen_back_at: int | None = None  # optimizer steps done then
        self._is_due = False  # an action, before the next step

    def look(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Judge a rollout.

        Args:
            metrics: Its mismatch, the same in all processes.

        Returns:
            The guard's own metric.
        """
        findings = self._guard.observe(metrics)
        if findings:
            logger.warning(self._describe(findings))
        # A run that resumes with the alarm on acts after its first rollout, if that does not turn the alarm off.
        if metrics and self._guard.alarm and self.fallen_back_at is None:
            self._is_due = self._action in ("stop", "fallback")
        if self.fallen_back_at is not None:
            return {GUARD: FALLEN_BACK}
        return {GUARD: ALARM if self._guard.alarm else QUIET}

    def _describe(self, findings: list[Finding]) -> str:
        found = ", ".join(f"{name} is {value:.3g} (threshold {limit:g})" for name, value, limit in findings)
        differ_by_rounding = self._differ_by_rounding and self.fallen_back_at is None
        return (
            f"The policy that samples has drifted from the policy that learns: over the last {WINDOW} rollouts the "
            f"median of {found}. {ADVICE if differ_by_rounding else ADVICE_WITHOUT_ROUNDING}"
            + (" mismatch_guard='stop' or 'fallback' would act on it." if self._action == "warn" else "")
        )

    def on_train_begin(self, args: Any, state: TrainerState, *more: Any, **kwargs: Any) -> None:
        """Fall back before the first rollout of a run that had fallen back."""
        is_quantized = self.trainer.vllm_generation.rollout.scheme is not None
        if self.fallen_back_at is not None and is_quantized:
            logger.warning("This run fell back to rollouts in 16 bits after step %d.", self.fallen_back_at)
            self._start_in_16_bits()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop or fall back if it is due."""
        if not self._is_due:
            return
        self._is_due = False
        if self._action == "stop":
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # with save_strategy="best" it would decide whether to save
            logger.warning(
                "Training stops after step %d (mismatch_guard='stop') and leaves a checkpoint in %s. Resume from it "
                "(resume_from_checkpoint) with other settings, such as a finer format or rollout_quantization=None: "
                "with the same ones it stops again.",
                state.global_step,
                args.output_dir,
            )
        elif not control.should_training_stop:  # after the last step there is nothing left to sample
            step = self.fallen_back_at = state.global_step
            logger.warning("Rollouts fall back to 16 bits after step %d (mismatch_guard='fallback').", step)
            self._guard.forget()
            self._start_in_16_bits()

    def _start_in_16_bits(self) -> None:
        generation = self.trainer.vllm_generation
        generation.restart(generation.rollout.in_16_bits())
        self.trainer._last_loaded_step = -1  # of TRL: the next rollout syncs first

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"settings": self._settings, "fallen_back_at": self.fallen_back_at, **self._guard.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on with what a checkpoint kept, unless its rollouts were judged under other settings."""
        if state is None or state["settings"] != self._settings:
            logger.info("The mismatch guard starts anew: the checkpoint's was off, or had other settings.")
            return
        self._guard.load_state_dict(state)
        self.fallen_back_at = state["fallen_back_at"]
