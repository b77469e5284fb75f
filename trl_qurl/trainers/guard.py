"""Reaction to a sampling policy that drifts from the trained one: a warning, a stop, or a fallback to 16 bits.

`rollout/guard.py` decides when to react. Its metrics are the same in all processes, so all act at the same step.
"""

from collections.abc import Mapping
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerControl, TrainerState, TrainingArguments

from trl_qurl.rollout.guard import ALARM, FALLEN_BACK, GUARD, QUIET, WINDOW, Finding, MismatchGuard
from trl_qurl.trainers.callbacks import TrainerAwareCallback

logger = get_logger(__name__)  # logs in the main process only

GUARD_FINGERPRINT = (
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
"""If any of these settings changes on resume, the guard's history is discarded."""

ADVICE = (
    "Leave smooth_activations on, correct for the difference (objective='tis' or 'acr'), use a finer "
    "rollout_quantization, or keep sensitive layers in 16 bits (`trl-qurl mismatch CHECKPOINT --kl 5e-3` lists them)."
)
ADVICE_WITHOUT_ROUNDING = (
    "Both policies have the same weights here, so rounding is not the cause: check the engine's settings "
    "(kv_cache_dtype, dtype) and sampling settings that the trainer does not account for (top_p, top_k)."
)


class MismatchGuardCallback(TrainerAwareCallback):
    """Callback that passes each training rollout's mismatch to a [`MismatchGuard`] and acts between optimizer steps.

    Args:
        args: The trainer's config, with `mismatch_guard` other than `off`.
    """

    def __init__(self, args: Any) -> None:
        self._action: str = args.mismatch_guard
        self._settings = {name: str(getattr(args, name, None)) for name in GUARD_FINGERPRINT}
        learns_rounded = args.training_forward == "quantized" or args.round_base
        self._differ_by_rounding = args.rollout_quantization is not None and not learns_rounded
        self._guard = MismatchGuard(args.mismatch_guard_kl, getattr(args, "vllm_importance_sampling_clip_max", None))
        self.fallback_step: int | None = None  # optimizer steps done before the fallback
        self._is_due = False  # whether to act before the next step

    def observe(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Check a rollout for drift.

        Args:
            metrics: The rollout's mismatch, the same in all processes.

        Returns:
            The guard's metric.
        """
        findings = self._guard.observe(metrics)
        if findings:
            logger.warning(self._describe(findings))
        # After resuming with the alarm on, act after one rollout unless it clears.
        if metrics and self._guard.alarm and self.fallback_step is None:
            self._is_due = self._action in ("stop", "fallback")
        if self.fallback_step is not None:
            return {GUARD: FALLEN_BACK}
        return {GUARD: ALARM if self._guard.alarm else QUIET}

    def _describe(self, findings: list[Finding]) -> str:
        medians = ", ".join(f"{name} is {value:.3g} (threshold {limit:g})" for name, value, limit in findings)
        differ_by_rounding = self._differ_by_rounding and self.fallback_step is None
        return (
            f"The sampling policy has drifted from the policy being trained: over the last {WINDOW} rollouts, the "
            f"median of {medians}. {ADVICE if differ_by_rounding else ADVICE_WITHOUT_ROUNDING}"
            + (" Set mismatch_guard='stop' or 'fallback' to act on it." if self._action == "warn" else "")
        )

    def on_train_begin(self, args: Any, state: TrainerState, *more: Any, **kwargs: Any) -> None:
        """Fall back again before the first rollout if the resumed run had fallen back."""
        is_quantized = self.trainer.vllm_generation.rollout.scheme is not None
        if self.fallback_step is not None and is_quantized:
            logger.warning("This run fell back to 16-bit rollouts after step %d.", self.fallback_step)
            self._start_in_16_bits()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop or fall back if an action is due."""
        if not self._is_due:
            return
        self._is_due = False
        if self._action == "stop":
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # with save_strategy="best", an evaluation would decide whether to save
            logger.warning(
                "Training stops after step %d (mismatch_guard='stop') and saves a checkpoint in %s. Resume from it "
                "(resume_from_checkpoint) with other settings, such as a finer format or rollout_quantization=None; "
                "with the same settings, it would stop again.",
                state.global_step,
                args.output_dir,
            )
        elif not control.should_training_stop:  # no rollout follows the last step
            step = self.fallback_step = state.global_step
            logger.warning("Rollouts fall back to 16 bits after step %d (mismatch_guard='fallback').", step)
            self._guard.forget()
            self._start_in_16_bits()

    def _start_in_16_bits(self) -> None:
        generation = self.trainer.vllm_generation
        generation.restart(generation.rollout.in_16_bits())
        self.trainer._last_loaded_step = -1  # makes TRL sync before the next rollout

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store in a checkpoint."""
        return {"settings": self._settings, "fallen_back_at": self.fallback_step, **self._guard.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore a checkpoint's state, unless one of the settings in `GUARD_FINGERPRINT` has changed."""
        if state is None or state["settings"] != self._settings:
            logger.info("The mismatch guard starts fresh: the checkpoint's was off or had other settings.")
            return
        self._guard.load_state_dict(state)
        self.fallback_step = state["fallen_back_at"]
