"""Judge each rollout, the first one included: does rounding explain how far the engine is from the
trainer?

A sync proves that what was sent has arrived. What a missing sync, a setting or a tied weight does
shows in the tokens only. Their metrics (`mismatch_metrics`) are the same in all processes, so all
act at the same step.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerCallback, TrainerControl, TrainerState

logger = get_logger(__name__)  # logs in the main process only

KL, RATIO, CONTRADICTED = "mismatch/kl_k3", "mismatch/ratio_mean", "mismatch/contradicted_share"
KL_ERROR, TOKENS, TAIL, ESS = (
    "mismatch/kl_k3_error",
    "mismatch/tokens",
    "mismatch/capped_share",
    "mismatch/ess",
)

# Figures that "were seen" are the worst of healthy runs: benchmarks/README.md has them, and those
# of planted faults. standard errors that count as noise: 16 tokens, such as one near tie in each
# completion, prove nothing
ERRORS = 4.0
# of the mean ρ, whose expectation is 1; 0.061 ± 0.063 was seen, and 0.9 with sampling options
BIAS = 0.05
CONTRADICTION = 0.002  # share of tokens; none was seen
SMALLEST_JUMP = 0.005  # of the KL, nats per token
# over the run's largest KL: 1.7 was seen; an evaluation has other prompts
JUMP, EVALUATION_JUMP = 3.0, 10.0
WINDOW = 5  # rollouts per median; also training rollouts without a finding that end an alarm
# limits of medians, because single rollouts have outliers; 0.0078 and 0.877 were seen
DRIFT = {TAIL: 0.01, ESS: 0.85}
# smallest cap C above which ratios count as a tail: up to 9 % of the tokens exceed C = 1.2
SMALLEST_CAP = 2.0

SAMPLING = (
    "Remove sampling options that the trainer ignores (top_p, top_k, penalties, others in "
    "generation_kwargs)."
)
STALE = (
    "Earlier rollouts agreed, so the engine may hold old weights: resume with "
    "sync_check_interval=1."
)
FUNCTION = (
    "Check the engine's kv_cache_dtype and dtype, tied weights, and whether "
    "rollout_quantization=None helps."
)
ROUNDING = (
    "Leave smooth_activations on, correct for the difference (objective='tis' or 'acr'), use a "
    "finer rollout_quantization, or keep sensitive layers in 16 bits (`trl-qurl mismatch "
    "CHECKPOINT --kl 5e-3` lists them)."
)
AHEAD = (
    "Rollouts are one step old: lower the learning rate, make fewer updates per rollout, or set "
    "rollouts_ahead=0."
)


class MismatchGuard(TrainerCallback):
    """Callback that warns of each alarm, and with `mismatch_guard="stop"` ends training after the
    current step.

    The alarm is on from a finding until `WINDOW` training rollouts have none. A resumed run starts
    without a history.
    """

    def __init__(self, args: Any) -> None:
        self._is_off, self._stops = args.mismatch_guard == "off", args.mismatch_guard == "stop"
        self._kl = args.mismatch_guard_kl
        advice = FUNCTION if args.rollout_quantization is None or args.round_base else ROUNDING
        self._drift_advice = AHEAD if args.rollouts_ahead else advice
        self._may_jump = bool(args.rollouts_ahead)  # their age varies, and their KL with it
        cap = args.importance_cap
        self._drift = {
            name: DRIFT[name] for name in DRIFT if name == ESS or cap is None or cap >= SMALLEST_CAP
        }
        self._rollouts: deque[Mapping[str, float]] = deque(maxlen=WINDOW)  # of training
        self._largest = math.inf  # KL of the rollouts without a finding; infinite before the first
        self._quiet = WINDOW  # training rollouts since the latest finding

    @property
    def alarm(self) -> bool:
        """Whether the alarm is on."""
        return self._quiet < WINDOW

    def observe(self, metrics: Mapping[str, float], training: bool = True) -> dict[str, float]:
        """Judge a rollout, warn if that raises the alarm, and return the guard's own metric, if it
        is on.
        """
        if self._is_off:
            return {}
        if findings := self.judge(metrics, training):
            causes, way = ", ".join(text for text, _ in findings), findings[0][1]
            way += "" if self._stops else " Set mismatch_guard='stop' to end training at an alarm."
            logger.warning(
                f"Rounding does not explain how far the actor is from the policy: {causes}. {way}"
            )
        return {"mismatch/guard": float(self.alarm)}

    def judge(self, row: Mapping[str, float], training: bool = True) -> list[tuple[str, str]]:
        """Judge a rollout or an evaluation by its metrics; return what raises the alarm, and advice
        for each.
        """
        if KL not in row:  # no token was scored
            return []
        had_alarm, findings = (
            self.alarm,
            list(self._judge(row, JUMP if training else EVALUATION_JUMP)),
        )
        if training and row[TOKENS] * DRIFT[TAIL] >= 1:  # fewer tokens do not show such a share
            self._rollouts.append(row)
            findings += self._judge_drift()
        self._quiet = 0 if findings else self._quiet + training
        if not findings and row[KL] < math.inf:
            self._largest = row[KL] if self._largest == math.inf else max(self._largest, row[KL])
        return [] if had_alarm else findings

    def _judge(self, row: Mapping[str, float], factor: float) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with a rollout, and advice. Comparisons with NaN are false; medians
        count it.
        """
        tokens, mean, share, kl, first = (
            row[TOKENS],
            row[RATIO],
            row[CONTRADICTED],
            row[KL],
            self._largest == math.inf,
        )
        # of the mean, around 1
        error = math.sqrt(max(mean**2 / row[ESS] - 2 * mean + 1, 0.0) / tokens)
        if abs(mean - 1) - ERRORS * error > BIAS:
            yield f"{RATIO} is {mean:.3g} ± {error:.1g}, not 1", SAMPLING
        jump = math.inf if self._may_jump else max(SMALLEST_JUMP, factor * self._largest)
        if kl - ERRORS * row[KL_ERROR] >= min(jump, self._kl):
            advice = FUNCTION if first else STALE if kl >= jump else self._drift_advice
            yield f"{KL} is {kl:.3g} (threshold {min(jump, self._kl):.2g})", advice
        if share - ERRORS * math.sqrt(share / tokens) >= CONTRADICTION:
            yield (
                f"{CONTRADICTED} is {share:.3g} (threshold {CONTRADICTION:g})",
                FUNCTION if first else STALE,
            )

    def _judge_drift(self) -> Iterator[tuple[str, str]]:
        """Yield medians beyond their limits, and advice."""
        for name, limit in self._drift.items() if len(self._rollouts) == WINDOW else ():
            sign = -1 if name == ESS else 1  # a lower one is worse
            value = median(
                sign * row[name] if math.isfinite(row[name]) else math.inf for row in self._rollouts
            )
            if value >= sign * limit:
                yield (
                    f"the median of {name} is {sign * value:.3g} (threshold {limit:g})",
                    self._drift_advice,
                )

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop, with a checkpoint, while the alarm is on."""
        if not (self._stops and self.alarm):
            return
        control.should_save = control.should_training_stop = True
        # with save_strategy="best", an evaluation would decide whether to save
        control.should_evaluate = False
        logger.warning(
            f"Training stops after step {state.global_step} (mismatch_guard='stop') and saves a "
            f"checkpoint in {args.output_dir}. To continue with 16-bit rollouts, resume from it "
            "(resume_from_checkpoint) with rollout_quantization=None; restart a server with "
            "`trl-qurl serve MODEL --scheme none`."
        )
