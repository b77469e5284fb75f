"""Judge the engine by the tokens it samples: does rounding explain how far it is from the policy?

A sync proves that what was sent has arrived. What the engine computes with it, and what a missing
sync, a setting or a tied weight does, shows in the tokens only. There are two judgements:

- `prove` belongs to the sync. It is due when `WeightSync.needs_proof`, and raises `SyncError`.
  `sync_check_interval` alone governs it.
- `observe` is the guard. It judges each rollout, and warns or stops, as `mismatch_guard` says.

The metrics (`mismatch_metrics`) are the same in all processes, so all act at the same step.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from statistics import fmean, median
from typing import Any, NamedTuple

from accelerate.logging import get_logger
from transformers import TrainerCallback, TrainerControl, TrainerState

from trl_qurl.config.checks.sampling import biasing_settings, cutting_settings
from trl_qurl.quantization.plan import schemes_of
from trl_qurl.rollout.errors import SyncError

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

ERRORS = 4.0
"""Standard errors that count as noise: 16 tokens, such as one near tie in each completion, prove
nothing."""

FIRST_ERRORS = 2.0
"""The same at a run's first rollout, which has no other to be compared with, and for a fault, whose
limit is far from what was seen."""

BIAS = 0.05
"""Of the mean ρ, whose expectation is 1. 0.080 ± 0.075 was seen, and 0.9 with sampling options."""

CONTRADICTION = 0.002
"""Share of tokens; none was seen. Below a temperature of 1, it shows nothing: sharpened, a near tie
is sure on both sides."""

SMALLEST_JUMP = 0.005
"""Of the KL, in nats per token."""

JUMP = 3.0
"""Over the run's largest KL; 1.7 was seen."""

OTHER_JUMP = 10.0
"""The same for an evaluation, which has other prompts."""

FAULT = 5.0
"""Over the run's largest KL: more than rounding or an update explains, so it stops a run where a
sync is due for a proof."""

USUAL = 0.1
"""The KL that is taken for the largest before there is a rollout; 0.076 was seen."""

USUAL_IN_FOUR_BITS = 0.6
"""The same for weights of four bits or fewer; 0.53 was seen, in a model of 270M parameters."""

USUAL_IN_16_BITS = 0.02
"""The same without any rounding; 0.0062 was seen."""

GROWTH = 10.0
"""Over the KL of a run's first rollout: what grows slowly, as with an engine that keeps its first
weights, is a fault beyond it; 6.2 was seen."""

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
STALE = (
    "Earlier rollouts agreed, so the engine may hold old weights: resume with "
    "sync_check_interval=1."
)
FUNCTION = (
    "Check the engine's kv_cache_dtype and dtype, tied weights, and whether "
    "rollout_quantization=None helps, or on a GPU VLLM_USE_V2_MODEL_RUNNER=0 (vLLM's older runner)."
)
ROUNDING = (
    "Leave smooth_activations on, correct for the difference (objective='tis' or 'acr'), use a "
    "finer rollout_quantization, or keep sensitive layers in 16 bits (`trl-qurl mismatch "
    "CHECKPOINT --kl 5e-3` lists them)."
)


def usual_at_first(args: Any) -> float:
    """Return the KL that a config's rollouts are expected to have at first, in nats per token.

    Dividing the logits by a temperature below 1 multiplies the noise of their rounding.
    """
    schemes = schemes_of(args.rollout_quantization)
    bits = [scheme.library_scheme.weights.num_bits for scheme in schemes]
    rounds_cache = "kv_cache_dtype" in (args.vllm_engine_kwargs or {})
    usual = USUAL
    if bits and min(bits) <= 4:
        usual = USUAL_IN_FOUR_BITS
    elif not bits and not rounds_cache:
        usual = USUAL_IN_16_BITS
    return usual / min(1.0, args.temperature)


class Finding(NamedTuple):
    """A figure beyond its limit."""

    text: str
    advice: str


class MismatchGuard(TrainerCallback):
    """Callback that warns of each alarm, and with `mismatch_guard="stop"` ends training.

    The alarm is on from a finding until `WINDOW` training rollouts have none. A resumed run starts
    without a history.

    Args:
        args: The trainer's config.
        follows_cuts: Whether log-probabilities of the policy are over the tokens that `top_k`,
            `top_p` and `min_p` leave.
    """

    def __init__(self, args: Any, follows_cuts: bool = False) -> None:
        self._is_off = args.mismatch_guard == "off"
        self._stops = args.mismatch_guard == "stop"
        self._kl_limit = args.mismatch_guard_kl
        cuts = not follows_cuts and cutting_settings(args)
        self._cuts_distribution = bool(cuts or biasing_settings(args))
        self._usual_at_first = usual_at_first(args)
        self._is_sharpened = args.temperature < 1
        self._drift_advice = ROUNDING
        if args.rollout_quantization is None or args.round_base:
            self._drift_advice = FUNCTION
        cap = args.importance_cap
        self._drift_limits = dict(DRIFT)
        if cap is not None and cap < SMALLEST_CAP:
            del self._drift_limits[TAIL]
        self._rollouts: deque[Mapping[str, float]] = deque(maxlen=WINDOW)  # of training
        self._largest: float | None = None  # KL of the rollouts without a finding
        self._usual: float | None = None  # largest KL of the rollouts that no fault explains
        self._first: float | None = None  # KL of the first of these in training
        self._quiet = WINDOW  # training rollouts since the latest finding
        self._was_contradicted = False  # whether the last proof failed, and is asked for again

    @property
    def alarm(self) -> bool:
        """Whether the alarm is on."""
        return self._quiet < WINDOW

    def observe(self, metrics: Mapping[str, float], training: bool = True) -> dict[str, float]:
        """Judge a rollout, warn if that raises the alarm, and return the guard's own metric."""
        findings = self.judge(metrics, training)
        if self._is_off:
            return {}
        if findings:
            causes = ", ".join(finding.text for finding in findings)
            way = findings[0].advice
            if not self._stops:
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
        findings = list(self._judge_rollout(row, JUMP if training else OTHER_JUMP))
        if training and row[TOKENS] * DRIFT[TAIL] >= 1:  # fewer tokens do not show such a share
            self._rollouts.append(row)
            findings += self._judge_drift()
        if findings:
            self._quiet = 0
        elif training:
            self._quiet += 1
        if math.isfinite(row[KL]):
            if not findings:
                self._largest = max(self._largest or 0.0, row[KL])
            if not self.contradiction(row, training):
                self._usual = max(self._usual or 0.0, row[KL])
                if training and self._first is None:
                    self._first = row[KL]
        return [] if had_alarm else findings

    def _judge_rollout(self, row: Mapping[str, float], jump: float) -> Iterator[Finding]:
        """Yield what is wrong with a rollout. Comparisons with NaN are false; medians count it."""
        is_first = self._largest is None
        errors = FIRST_ERRORS if is_first else ERRORS

        mean = row[RATIO]
        variance = max(mean**2 / row[ESS] - 2 * mean + 1, 0.0)  # of ρ, around 1
        error = math.sqrt(variance / row[TOKENS])
        if abs(mean - 1) - ERRORS * error > BIAS:
            yield Finding(f"{RATIO} is {mean:.3g} ± {error:.1g}, not 1", SAMPLING)

        jump_limit = max(SMALLEST_JUMP, jump * self._largest) if self._largest is not None else None
        limit = self._kl_limit if jump_limit is None else min(jump_limit, self._kl_limit)
        if row[KL] - errors * row[KL_ERROR] >= limit:
            advice = self._drift_advice
            if jump_limit is not None and row[KL] >= jump_limit:
                advice = STALE
            elif jump_limit is None:
                advice = FUNCTION
            yield Finding(f"{KL} is {row[KL]:.3g} (threshold {limit:.2g})", advice)

        share = row[CONTRADICTED]
        if self._has_contradicted_tokens(row, errors):
            text = f"{CONTRADICTED} is {share:.3g} (threshold {CONTRADICTION:g})"
            yield Finding(text, FUNCTION if is_first else STALE)

    def _judge_drift(self) -> Iterator[Finding]:
        """Yield medians beyond their limits."""
        if len(self._rollouts) < WINDOW:
            return
        for name, limit in self._drift_limits.items():
            sign = -1 if name == ESS else 1  # a lower one is worse
            values = [sign * row[name] for row in self._rollouts]
            values = [value if math.isfinite(value) else math.inf for value in values]
            value = median(values)
            # Two of 160 tokens, in three rollouts of five, are no tail.
            is_sparse = name == TAIL and fmean(values) < limit
            if value >= sign * limit and not is_sparse:
                text = f"the median of {name} is {sign * value:.3g} (threshold {limit:g})"
                yield Finding(text, self._drift_advice)

    def _has_contradicted_tokens(self, row: Mapping[str, float], errors: float) -> bool:
        share = row[CONTRADICTED]
        noise = errors * math.sqrt(share / row[TOKENS])
        return not self._is_sharpened and share - noise >= CONTRADICTION

    def contradiction(self, row: Mapping[str, float], training: bool = True) -> str:
        """Return what neither rounding nor an update explains, as a clause; empty for nothing."""
        limit = self._fault_limit(training)
        if row[KL] - FIRST_ERRORS * row[KL_ERROR] >= limit:
            figure = f"{row[KL]:.3g} ± {row[KL_ERROR]:.1g}"
            return f"{KL} is {figure}, but at most {limit:.2g} would do"
        if self._has_contradicted_tokens(row, ERRORS):
            share = row[CONTRADICTED]
            return (
                f"the policy finds {share:.1%} of the tokens unlikely that the engine was sure of"
            )
        return ""

    def _fault_limit(self, training: bool) -> float:
        """Return the KL from which it is a fault, in nats per token."""
        jump = FAULT if training else OTHER_JUMP
        if self._usual is None:
            return self._usual_at_first * jump
        limit = max(SMALLEST_JUMP, self._usual) * jump
        if self._first is None:
            return limit
        grown = max(SMALLEST_JUMP, self._first) * GROWTH
        return min(limit, max(grown, self._usual_at_first))

    def is_contradicted(self, row: Mapping[str, float], training: bool) -> bool:
        """Return whether a rollout that proves nothing yet speaks against the engine's function."""
        if self._cuts_distribution or KL not in row:
            return False
        return bool(self.contradiction(row, training))

    def prove(self, row: Mapping[str, float], training: bool, asks_again: bool) -> bool:
        """Return whether a rollout shows that the engine computes the policy's function.

        Nothing can be shown if the engine cuts the distribution that it samples from (`top_p`):
        then it is taken for granted.

        Args:
            row: Metrics of the rollout.
            training: Whether it is one of training, or of an evaluation.
            asks_again: Whether a contradiction must be seen twice, as on GPUs, where nobody has
                measured yet how far kernels may be apart.

        Returns:
            False if it shows nothing, because no token was scored, or has to be asked again.

        Raises:
            SyncError: The engine computes another function.
        """
        if self._cuts_distribution:
            return True
        if KL not in row:
            return False
        contradiction = self.contradiction(row, training)
        if not contradiction:
            self._was_contradicted = False
            return True
        text = f"The engine computes another function than the policy: {contradiction}."
        if asks_again and not self._was_contradicted:
            self._was_contradicted = True
            logger.warning(f"{text} The next rollout decides whether the run stops.")
            return False
        way = f"It does not use the weights that were sent. {FUNCTION}"
        if self._usual is not None:
            way = (
                "It does not use the weights that were sent, or one update has changed the policy "
                f"this much. {FUNCTION} Resume from the last checkpoint, with a lower "
                "learning_rate if grad_norm grew."
            )
        raise SyncError(f"{text} {way} sync_check_interval=0 turns this check off.")

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop, with a checkpoint, while the alarm is on."""
        if not (self._stops and self.alarm):
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
