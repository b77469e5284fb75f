"""Raise an alarm when the policy that samples drifts away from the policy that learns.

The guard reads the metrics of each rollout (`mismatch_metrics`) and reports alarms; the caller decides what to do
about them (`trainers/guard.py`). It judges medians, because single rollouts of healthy runs have outliers.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any, NamedTuple

WINDOW = 5
"""Rollouts per median. A run is not judged before it has this many."""

KL, TAIL, ESS = "mismatch/kl_k3", "mismatch/capped_share", "mismatch/ess"
"""The metrics to watch."""

GUARD = "mismatch/guard"
QUIET, ALARM, FALLEN_BACK = 0.0, 1.0, 2.0
"""The guard's own metric, and its values."""

# Evidence for all thresholds: the runs of benchmarks/study.md, replayed by benchmarks/guard.py. In the 185 runs that
# were not harmed, medians of five rollouts reached at worst a KL of 0.069 (W4A16 with a merged adapter, one of five
# seeds; 0.030 in all other formats), a tail of 0.0078, and an effective sample size of 0.877. Each of the 140 runs
# with INT3 weights crossed at least one of the thresholds.
KL_THRESHOLD = 0.1
"""Default threshold of the KL, in nats per token."""

TAIL_THRESHOLD = 0.01
"""Share of tokens whose ratio exceeds the cap."""

ESS_THRESHOLD = 0.85
"""Effective sample size as a share of the tokens; lower is worse."""

SMALLEST_CAP = 2.0
"""Smallest cap C above which ratios count as a tail: with C = 1.2, up to 9 % of the tokens exceed it."""


class Limit(NamedTuple):
    """The range of a metric."""

    ideal: float  # without any mismatch
    threshold: float  # of the alarm

    def fraction(self, value: float) -> float:
        """Return the distance from the ideal as a fraction of the threshold's; infinite for NaN and infinity."""
        return (value - self.ideal) / (self.threshold - self.ideal) if math.isfinite(value) else math.inf

    def value(self, fraction: float) -> float:
        """Return the value at this fraction of the distance."""
        return self.ideal + fraction * (self.threshold - self.ideal)


class Finding(NamedTuple):
    """A metric beyond its threshold."""

    metric: str
    median: float  # of the last `WINDOW` rollouts
    threshold: float


class MismatchGuard:
    """Watches KL, the tail of the importance ratio and the effective sample size of one run.

    The alarm is raised once the median of one of them over the last `WINDOW` rollouts reaches its threshold. It clears
    once all medians are less than half as far from their ideal (0, or 1 for the effective sample size) as their
    thresholds are.

    Args:
        kl: Threshold of the KL, in nats per token.
        cap: C. With a cap below 2, ratios above it are not a tail and are not watched. `None` for no cap.
    """

    def __init__(self, kl: float = KL_THRESHOLD, cap: float | None = None) -> None:
        self.alarm = False
        self._limits = {KL: Limit(0.0, kl), ESS: Limit(1.0, ESS_THRESHOLD)}
        if cap is None or cap >= SMALLEST_CAP:
            self._limits[TAIL] = Limit(0.0, TAIL_THRESHOLD)
        self.forget()

    def forget(self, rollouts: Iterable[dict[str, float]] = (), alarm: bool = False) -> None:
        """Start over, from these rollouts if there are any."""
        self._rollouts = deque(rollouts, maxlen=WINDOW)
        self.alarm = alarm

    def observe(self, metrics: Mapping[str, float]) -> list[Finding]:
        """Record the metrics of a rollout.

        Args:
            metrics: From `mismatch_metrics`. Empty metrics (no token was scored) change nothing.

        Returns:
            The metrics beyond their thresholds if this rollout raises the alarm; otherwise an empty list.
        """
        if not metrics:
            return []
        self._rollouts.append({name: metrics[name] for name in self._limits})
        if len(self._rollouts) < WINDOW:
            return []
        fractions = {
            name: median(limit.fraction(rollout[name]) for rollout in self._rollouts)
            for name, limit in self._limits.items()
        }
        if self.alarm:
            self.alarm = max(fractions.values()) >= 0.5
            return []
        names = [name for name, fraction in fractions.items() if fraction >= 1.0]
        self.alarm = bool(names)
        limits = self._limits
        return [Finding(name, limits[name].value(fractions[name]), limits[name].threshold) for name in names]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run continues from."""
        return {"rollouts": list(self._rollouts), "alarm": self.alarm}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict`."""
        self.forget(state["rollouts"], state["alarm"])
