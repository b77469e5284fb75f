"""Where the seconds of a rollout and its updates go, from the times that the trainers log."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trl_qurl.lab.report.curves import points_of, updates_per_rollout
from trl_qurl.trainers.run_log import Run

PARTS = ("generation", "gathering, rounding", "sending", "checks", "log-probabilities", "values", "updates", "other")
"""What the seconds of a rollout are spent on, in the order of a bar."""

TIMES = (
    "time/generate_s",
    "time/quantize_s",
    "time/sync_s",
    "time/sync_check_s",
    "time/logps_s",
    "time/values_s",
    "time/update_s",
    "time/critic_update_s",
    "step_time",
)
"""The metrics they are made of."""


def seconds_per_rollout(run: Run) -> dict[str, float]:
    """Mean seconds of each part, of those that were logged; the first value of every metric is left out if it can be.

    Most metrics are logged once per rollout, `time/update_s` and `step_time` once per optimizer update. TRL's
    `step_time` contains the rollout, but neither the optimizer's own step nor a critic's update: the rest is at least
    what it has beyond the parts.
    """
    updates = updates_per_rollout(run) or 1.0
    mean = {name: _mean(run, name) for name in TIMES}
    sync, quantize, update = mean["time/sync_s"], mean["time/quantize_s"], mean["time/update_s"]
    parts = {
        "generation": mean["time/generate_s"],
        "gathering, rounding": quantize,
        "sending": None if sync is None else max(0.0, sync - (quantize or 0.0)),
        "checks": mean["time/sync_check_s"],
        "log-probabilities": mean["time/logps_s"],
        "values": mean["time/values_s"],
        "updates": None if update is None else updates * update,
    }
    logged = {part: seconds for part, seconds in parts.items() if seconds is not None}
    if mean["step_time"] is not None and "updates" in logged and "generation" in logged:
        known = sum(logged.values()) - updates * (mean["time/critic_update_s"] or 0.0)
        logged["other"] = max(0.0, updates * mean["step_time"] - known)
    return logged


def mean_seconds(runs: Sequence[Run]) -> dict[str, float]:
    """The mean over runs of each part that any of them logged."""
    splits = [seconds_per_rollout(run) for run in runs]
    return {
        part: float(np.mean([split[part] for split in splits if part in split]))
        for part in PARTS
        if any(part in split for split in splits)
    }


def _mean(run: Run, metric: str) -> float | None:
    values = points_of(run, metric).values
    return float((values[1:] if values.size > 1 else values).mean()) if values.size else None
