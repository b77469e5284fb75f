"""Judge the engine by the tokens it samples: does rounding explain how far it is from the policy?

A sync shows that what was sent has arrived. What the engine computes with it, and what a missing
sync, a setting or a tied weight does, shows in the tokens only. The same limits serve twice:

- Where `WeightSync.needs_proof`, the policy scores a few tokens before anything is learned from
  them, and a contradiction raises `SyncError`. `sync_check_interval` alone governs that.
- Each rollout that has been scored is judged, which warns or stops, as `mismatch_guard` says.

The metrics (`mismatch_metrics`) are the same in all processes, so all act at the same step.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from statistics import fmean, median
from typing import Any, NamedTuple

from accelerate.logging import get_logger
from transformers import TrainerControl, TrainerState

from trl_qurl.config.checks.sampling import biasing_settings, cutting_settings
from trl_qurl.quantization.plan import schemes_of
from trl_qurl.rollout.errors import SyncError
from trl_qurl.trainers.callbacks import RolloutCallback
from trl_qurl.trainers.checks.samples import mismatch_of_samples
from trl_qurl.trainers.scoring import Rollout

logger = get_logger(__name__)  # logs in the main process only

KL = "mismatch/kl_k3"
KL_ERROR = "mismatch/kl_k3_error"
RATIO = "mismatch/ratio_mean"
CONTRADICTED = "mismatch/contradicted_share"
TOKENS = "mismatch/tokens"
TAIL = "mismatch/capped_share"
ESS = "mismatch/ess"

# Figures that "were seen" are the worst of healthy runs: benchmarks/README.md has them, and those
# of planted faults.

USUAL = {16: 0.02, 8: 0.1, 0: 0.6}
"""KL that is taken for the largest before there is a rollout, in nats per token, by the least bits
of a layer's weights; 0.0062, 0.076 and 0.53 were seen."""

SMALLEST = 0.005
"""KL below which the largest of a run is not taken."""

JUMP = 3.0
"""Over the run's largest KL; 1.7 was seen."""

FAULT = 5.0
"""Over the run's largest KL: more than rounding or an update explains."""

OTHER = 2.0
"""Factor for an evaluation, which has other prompts."""

CONTRADICTION = 0.002
"""Share of tokens that the engine was sure of and the policy finds unlikely; none was seen. Below a
temperature of 1, it shows nothing: sharpened, a near tie is sure on both sides."""

BIAS = 0.05
"""Of the mean ρ, whose expectation is 1. 0.080 ± 0.075 was seen, and 0.9 with sampling options."""

ERRORS = 4.0
"""Standard errors that count as noise: 16 tokens, such as one near tie in each completion, prove
nothing."""

FEW_ERRORS = 2.0
"""The same at a run's first rollout, which has no other to be compared with, and for a fault, whose
limit is far from what was seen."""

WINDOW = 5
"""Rollouts per median; also training rollouts without a finding that end an alarm."""

DRIFT = {TAIL: 0.01, ESS: 0.85}
"""Limits of medians, because single rollouts have outliers; 0.0075 and 0.877 were seen. The tail's
mean must reach it, too."""

SMALLEST_CAP = 2.0
"""Smallest cap C above which ratios count as a tail: up to 9 % of the tokens exceed C = 1.2."""

SAMPLING = (
    "Remove sampling options that the trainer cannot follow (penalties, others in "
    "generation_kwargs; top_p, top_k and min_p if a warning named them)."
)
FUNCTION = (
    "Check the engine's kv_cache_dtype and dtype, tied weights, and whether "
    "rollout_quantization=None helps, or on a GPU VLLM_USE_V2_MODEL_RUNNER=0 (vLLM's older "
    "runner). If earlier rollouts agreed, the engine may hold old weights, or one update has "
    "changed the policy this much: resume with sync_check_interval=1, and with a lower "
    "learning_rate if grad_norm grew."
)
ROUNDING = (
    "Leave smooth_activations on, correct for the difference (objective='tis' or 'acr'), use a "
    "finer rollout_quantization, or keep sensitive layers in 16 bits (`trl-qurl mismatch "
    "CHECKPOINT --kl 5e-3` lists them). If there is no rounding, check the engine's dtype."
)


def usual_kl(args: Any) -> float:
    """Return the KL that a config's rollouts are expected to have, in nats per token.

    Dividing the logits by a temperature below 1 multiplies the noise of their rounding.
    """
    schemes = schemes_of(args.rollout_quantization)
    bits = min((scheme.library_scheme.weights.num_bits for scheme in schemes), default=16)
    if "kv_cache_dtype" in (args.vllm_engine_kwargs or {}):
        bits = min(bits, 8)
    usual = next(kl for least, kl in USUAL.items() if bits >= least)
    return usual / min(1.0, args.temperature)


class Finding(NamedTuple):
    """A figure beyond its limit."""

    text: str
    advice: str


class MismatchGuard(RolloutCallback):
    """Callback that warns of each alarm, and with `mismatch_guard="stop"` ends training.

    The alarm is on from a finding until `WINDOW` training rollouts have none. A resumed run starts
    without a history.

    Args:
        args: The trainer's config.
    """

    def __init__(self, args: Any) -> None:
        self._action = args.mismatch_guard
        self._limit = args.mismatch_guard_kl
        self._usual = usual_kl(args)
        self._is_sharpened = args.temperature < 1
        # Whether only samples of the engine are judged: a trainer scores no rollouts, or those of a
        # `rollout_func`, which may put several turns together.
        self._judges_samples = False
        # Whether tokens show nothing, because the two distributions differ on purpose.
        self._is_blind = bool(biasing_settings(args) or cutting_settings(args))
        self._drift_limits = dict(DRIFT)
        if args.importance_cap is not None and args.importance_cap < SMALLEST_CAP:
            del self._drift_limits[TAIL]
        self._largest: float | None = None  # usual KL so far
        self._recent: deque[Mapping[str, float]] = deque(maxlen=WINDOW)  # rollouts of training
        self._quiet = WINDOW  # training rollouts since the latest finding

    def on_engine(self) -> None:
        """Note what the trainer scores; it may follow a distribution that is cut."""
        trainer = self.trainer
        composes = vars(trainer).get("rollout_func") is not None
        self._judges_samples = composes or not trainer._scores_rollouts
        if trainer._listed_count:
            self._is_blind = bool(biasing_settings(trainer.args))

    def on_rollout(self, rollout: Rollout) -> None:
        """Raise `SyncError` if a proof is due, and the engine computes another function."""
        trainer = self.trainer
        sync = trainer.vllm_generation.sync
        if self._is_blind:
            sync.needs_proof = False
        if not sync.needs_proof:
            return
        scored = mismatch_of_samples(trainer, rollout.samples)
        if KL not in scored:  # no token was
            return
        contradiction = self.contradiction(scored, trainer.model.training)
        if contradiction:
            raise SyncError(
                f"The engine computes another function than the policy: {contradiction}. It does "
                f"not use the weights that were sent. {FUNCTION} sync_check_interval=0 turns this "
                "check off."
            )
        sync.needs_proof = False
        if self._judges_samples:
            if not trainer._scores_rollouts:
                self.record(scored)
            self._judge_and_log(scored)

    def on_scored(self, metrics: Mapping[str, float]) -> None:
        """Judge a rollout, unless tokens were not sampled where they are scored."""
        if not self._judges_samples:
            self._judge_and_log(metrics)

    def _judge_and_log(self, metrics: Mapping[str, float]) -> None:
        trainer = self.trainer
        is_training = trainer.model.training
        if trainer.args.sync_check_interval and KL in metrics:
            # What is contradicted between two proofs asks for one.
            sync = trainer.vllm_generation.sync
            sync.needs_proof |= bool(self.contradiction(metrics, is_training))
        self.record(self.observe(metrics, is_training))

    @property
    def alarm(self) -> bool:
        """Whether the alarm is on."""
        return self._quiet < WINDOW

    def observe(self, metrics: Mapping[str, float], training: bool = True) -> dict[str, float]:
        """Judge a rollout, warn if that raises the alarm, and return the guard's own metric."""
        findings = self.judge(metrics, training)
        if self._action == "off":
            return {}
        if findings:
            causes = ", ".join(finding.text for finding in findings)
            way = findings[0].advice
            if self._action == "warn":
                way += " Set mismatch_guard='stop' to end training at an alarm."
            logger.warning(
                f"Rounding does not explain how far the actor is from the policy: {causes}. {way}"
            )
        return {"mismatch/guard": float(self.alarm)}

    def judge(self, row: Mapping[str, float], training: bool = True) -> list[Finding]:
        """Judge a rollout or an evaluation by its metrics; return what raises the alarm."""
        if KL not in row:  # no token was scored
            return []
        had_alarm = self.alarm
        contradiction = self.contradiction(row, training)
        findings = list(self._judge_rollout(row, contradiction, training))
        if training and row[TOKENS] * DRIFT[TAIL] >= 1:  # fewer tokens do not show such a share
            self._recent.append(row)
            findings += self._judge_drift()
        if findings:
            self._quiet = 0
        elif training:
            self._quiet += 1
        if row[KL] < self._usual and not contradiction:
            self._largest = max(self._largest or 0.0, row[KL])
        return [] if had_alarm else findings

    def contradiction(self, row: Mapping[str, float], training: bool = True) -> str:
        """Return what neither rounding nor an update explains, as a clause; empty for nothing."""
        if self._is_blind:
            return ""
        limit = FAULT * self._known(training)
        if row[KL] - FEW_ERRORS * row[KL_ERROR] >= limit:
            figure = f"{row[KL]:.3g} ± {row[KL_ERROR]:.1g}"
            return f"{KL} is {figure}, but at most {limit:.2g} would do"
        share = row[CONTRADICTED]
        noise = ERRORS * math.sqrt(share / row[TOKENS])
        if share - noise >= CONTRADICTION and not self._is_sharpened:
            return (
                f"{CONTRADICTED} is {share:.2g}: tokens that the engine was sure of and the "
                "policy finds unlikely"
            )
        return ""

    def _known(self, training: bool) -> float:
        """Return the KL with which a rollout or an evaluation is compared, in nats per token."""
        known = self._usual if self._largest is None else max(SMALLEST, self._largest)
        return known if training else OTHER * known

    def _judge_rollout(
        self, row: Mapping[str, float], contradiction: str, training: bool
    ) -> Iterator[Finding]:
        """Yield what is wrong with a rollout. Comparisons with NaN are false; medians count it."""
        mean = row[RATIO]
        variance = max(mean**2 / row[ESS] - 2 * mean + 1, 0.0)  # of ρ, around 1
        error = math.sqrt(variance / row[TOKENS])
        if abs(mean - 1) - ERRORS * error > BIAS:
            yield Finding(f"{RATIO} is {mean:.3g} ± {error:.1g}, not 1", SAMPLING)

        if contradiction:
            yield Finding(contradiction, FUNCTION)
            return
        limit = self._limit
        errors = FEW_ERRORS
        if self._largest is not None:
            limit = min(limit, JUMP * self._known(training))
            errors = ERRORS
        if row[KL] - errors * row[KL_ERROR] >= limit:
            yield Finding(f"{KL} is {row[KL]:.3g} (threshold {limit:.2g})", ROUNDING)

    def _judge_drift(self) -> Iterator[Finding]:
        """Yield medians beyond their limits."""
        if len(self._recent) < WINDOW:
            return
        for name, limit in self._drift_limits.items():
            sign = -1 if name == ESS else 1  # a lower one is worse
            values = [sign * row[name] for row in self._recent]
            values = [value if math.isfinite(value) else math.inf for value in values]
            value = median(values)
            # Two of 160 tokens, in three rollouts of five, are not a tail.
            is_sparse = name == TAIL and fmean(values) < limit
            if value >= sign * limit and not is_sparse:
                text = f"the median of {name} is {sign * value:.3g} (threshold {limit:g})"
                yield Finding(text, ROUNDING)

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop, with a checkpoint, while the alarm is on."""
        if self._action != "stop" or not self.alarm:
            return
        control.should_save = True
        control.should_training_stop = True
        # With save_strategy="best", an evaluation would decide whether to save.
        control.should_evaluate = False
        logger.warning(
            f"Training stops after step {state.global_step} (mismatch_guard='stop') and saves a "
            f"checkpoint in {args.output_dir}. To continue with 16-bit rollouts, resume from it "
            "(resume_from_checkpoint) with rollout_quantization=None; restart a server with "
            "`trl-qurl serve MODEL --scheme none`."
        )
