"""Notices when the policy that samples drifts away from the policy that learns.

It reads the metrics of each rollout (`mismatch_metrics`) and says when an alarm goes on. What is done then is decided
by whoever asks (`trainers/guard.py`). It decides on medians, because single rollouts of healthy runs have outliers.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any, NamedTuple

WINDOW = 5
"""Rollouts whose medians decide. No run is judged before it has as many."""

KL, TAIL, ESS = "mismatch/kl_k3", "mismatch/capped_share", "mismatch/ess"
"""What is watched."""

GUARD = "mismatch/guard"
QUIET, ALARM, FALLEN_BACK = 0.0, 1.0, 2.0
"""The guard's own metric, and its values."""

# Evidence for all thresholds: the runs of benchmarks/study.md, replayed by benchmarks/guard.py. In the 185 runs that
# were not harmed, medians of five rollouts went up to a KL of 0.069 (W4A16 with a merged adapter, one of five seeds;
# all other formats 0.030) and a tail of 0.0078, and down to an effective sample size of 0.877. Each of the 140 runs
# with INT3 weights went beyond at least one of the thresholds.
KL_THRESHOLD = 0.1
"""Default KL, in nats per token."""

TAIL_THRESHOLD = 0.01
"""Share of tokens whose ratio is above the cap."""

ESS_THRESHOLD = 0.85
"""Effective sample size, a share of the tokens; lower is worse."""

SMALLEST_CAP = 2.0
"""Cap C below which tokens above it are no tail: with C = 1.2, up to 9 % of the tokens are."""


class Limit(NamedTuple):
    """What a metric is without any mismatch, and where the alarm goes on."""

    ideal: float
    threshold: float

    def used(self, value: float) -> float:
        """How far a value is from the ideal, in units of the threshold's distance; infinite for NaN and infinity."""
        return (value - self.ideal) / (self.threshold - self.ideal) if math.isfinite(value) else math.inf

    def value(self, used: float) -> float:
        """The value that is this far from the ideal."""
        return self.ideal + used * (self.threshold - self.ideal)


class Finding(NamedTuple):
    """A metric beyond its threshold."""

    metric: str
    median: float  # of the last `WINDOW` rollouts
    threshold: float


class MismatchGuard:
    """Watches KL, the tail of the importance ratio and the effective sample size of one run.

    The alarm goes on once the median of one of them over the last `WINDOW` rollouts reaches its threshold. It goes off
    once all medians are less than half as far from their ideal (0, or 1 for the effective sample size) as their
    thresholds are.

    Args:
        kl: Threshold of the KL, in nats per token.
        cap: C. The share of ratios above a cap below 2 is not a tail, and is not watched. `None` for no cap.
    """

    def __init__(self, kl: float = KL_THRESHOLD, cap: float | None = None) -> None:
        self.alarm = False
        self._limits = {KL: Limit(0.0, kl), ESS: Limit(1.0, ESS_THRESHOLD)}
        if cap is None or cap >= SMALLEST_CAP:
            self._limits[TAIL] = Limit(0.0, TAIL_THRESHOLD)
        self.forget()

    def forget(self, rollouts: Iterable[dict[str, float]] = (), alarm: bool = False) -> None:
        """Start anew, or from other rollouts."""
        self._rollouts = deque(rollouts, maxlen=WINDOW)
        self.alarm = alarm

    def observe(self, metrics: Mapping[str, float]) -> list[Finding]:
        """Take in the metrics of a rollout.

        Args:
            metrics: As `mismatch_metrics` has them; none if no token was scored, which changes nothing.

        Returns:
            What is beyond its threshold, if this rollout turns the alarm on; otherwise nothing.
        """
        if not metrics:
            return []
        self._rollouts.append({name: metrics[name] for name in self._limits})
        if len(self._rollouts) < WINDOW:
            return []
        used = {
            name: median(limit.used(rollout[name]) for rollout in self._rollouts)
            for name, limit in self._limits.items()
        }
        if self.alarm:
            self.alarm = max(used.values()) >= 0.5
            return []
        found = [name for name, share in used.items() if share >= 1.0]
        self.alarm = bool(found)
        return [Finding(name, self._limits[name].value(used[name]), self._limits[name].threshold) for name in found]

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on with."""
        return {"rollouts": list(self._rollouts), "alarm": self.alarm}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` gave."""
        self.forget(state["rollouts"], state["alarm"])
