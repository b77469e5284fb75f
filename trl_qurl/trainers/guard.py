"""Raise an alarm when the policy that samples drifts away from the policy being trained, and warn or stop.

The guard reads the metrics of each rollout (`mismatch_metrics`), which are the same in all processes, so all act at
the same step. It judges medians, because single rollouts of healthy runs have outliers. A resumed run starts without
a history.
"""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerCallback, TrainerControl, TrainerState

logger = get_logger(__name__)  # logs in the main process only

WINDOW = 5  # rollouts per median; a run is not judged before it has this many

KL, TAIL, ESS = "mismatch/kl_k3", "mismatch/capped_share", "mismatch/ess"  # their ideals are 0, 0 and 1

# benchmarks/guard.py replays our study: none of its 144 healthy runs reaches a threshold (a tail of 0.0078 and an
# effective sample size of 0.877 at worst), and all 140 with INT3 weights do. The KL's is a setting.
TAIL_THRESHOLD = 0.01  # share of tokens whose ratio exceeds the cap
ESS_THRESHOLD = 0.85  # effective sample size as a share of the tokens; lower is worse
SMALLEST_CAP = 2.0  # smallest cap C above which ratios count as a tail: up to 9 % of the tokens exceed C = 1.2

ADVICE = (
    "Leave smooth_activations on, correct for the difference (objective='tis' or 'acr'), use a finer "
    "rollout_quantization, or keep sensitive layers in 16 bits (`trl-qurl mismatch CHECKPOINT --kl 5e-3` lists them)."
)
ADVICE_WITHOUT_ROUNDING = (
    "Both policies have the same weights here, so rounding is not the cause: check the engine's settings "
    "(kv_cache_dtype, dtype) and sampling settings that the trainer does not account for (top_p, top_k)."
)

ADVICE_AHEAD = (
    " The weights that sample are one rollout old, too: lower the learning rate, make fewer updates per rollout, or "
    "set rollouts_ahead=0."
)


class MismatchGuard:
    """Watches KL (threshold in nats per token), the tail of the importance ratio, and the effective sample size.

    The alarm is raised once the median of one over the last `WINDOW` rollouts reaches its threshold. It clears once
    all medians are less than half as far from their ideals as the thresholds are.
    """

    def __init__(self, kl: float, cap: float | None = None) -> None:
        self.alarm = False
        self._thresholds = {KL: kl, ESS: ESS_THRESHOLD}
        if cap is None or cap >= SMALLEST_CAP:
            self._thresholds[TAIL] = TAIL_THRESHOLD
        self._rollouts: deque[Mapping[str, float]] = deque(maxlen=WINDOW)

    def observe(self, metrics: Mapping[str, float]) -> list[str]:
        """Record a rollout's metrics, empty if no token was scored; if it raises the alarm, say which are beyond."""
        if metrics:
            self._rollouts.append(metrics)
        if not metrics or len(self._rollouts) < WINDOW:
            return []
        distances = {name: median(_distance(row[name], name) for row in self._rollouts) for name in self._thresholds}
        allowed = {name: _distance(threshold, name) for name, threshold in self._thresholds.items()}
        share = 0.5 if self.alarm else 1.0
        had_alarm, self.alarm = self.alarm, any(distances[name] >= share * allowed[name] for name in distances)
        if had_alarm:
            return []
        return [
            f"{name} is {1 - distance if name == ESS else distance:.3g} (threshold {self._thresholds[name]:g})"
            for name, distance in distances.items()
            if distance >= allowed[name]
        ]


def _distance(value: float, name: str) -> float:
    """Return the distance of a metric from its ideal; infinite for NaN and infinity."""
    return (1 - value if name == ESS else value) if math.isfinite(value) else math.inf


class MismatchGuardCallback(TrainerCallback):
    """Callback that warns of each alarm, and with `mismatch_guard="stop"` ends training after the current step."""

    def __init__(self, args: Any) -> None:
        self._stops = args.mismatch_guard == "stop"
        differ_by_rounding = args.rollout_quantization is not None and not args.round_base
        self._advice = ADVICE if differ_by_rounding else ADVICE_WITHOUT_ROUNDING
        self._advice += ADVICE_AHEAD if args.rollouts_ahead else ""
        cap = getattr(args, "vllm_importance_sampling_clip_max", None)  # not a setting of all of TRL's trainers
        self._guard = MismatchGuard(args.mismatch_guard_kl, cap)

    def observe(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Check a training rollout's mismatch for drift, and return the guard's own metric."""
        if findings := self._guard.observe(metrics):
            logger.warning(
                f"The sampling policy has drifted from the policy being trained: over the last {WINDOW} rollouts, the "
                f"median of {', '.join(findings)}. {self._advice}"
                + ("" if self._stops else " Set mismatch_guard='stop' to end training at an alarm.")
            )
        return {"mismatch/guard": float(self._guard.alarm)}

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop, with a checkpoint, while the alarm is on."""
        if not (self._stops and self._guard.alarm):
            return
        control.should_save = control.should_training_stop = True
        control.should_evaluate = False  # with save_strategy="best", an evaluation would decide whether to save
        logger.warning(
            "Training stops after step %d (mismatch_guard='stop') and saves a checkpoint in %s. To continue with "
            "16-bit rollouts, resume from it (resume_from_checkpoint) with rollout_quantization=None; restart a "
            "server with `trl-qurl serve MODEL --scheme none`. With the same settings, the alarm would return.",
            state.global_step,
            args.output_dir,
        )
