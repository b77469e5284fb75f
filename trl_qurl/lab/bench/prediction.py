"""Predict step times, speed-ups and advice from measured costs."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from trl_qurl.lab.bench.costs import NOTHING, EngineCosts, Range, TrainingCosts, at_size
from trl_qurl.lab.bench.workload import Workload

WORTHWHILE = 1.05
"""Minimum speed-up of a step that justifies quantized rollouts as another source of error."""


@dataclass(frozen=True)
class Step:
    """Predicted seconds of each part of a training step.

    Attributes:
        sync: Sending the weights to the engine.
        generate: Generating the rollout.
        score: Computing the policy's log-probabilities at rollout time; skipped with one update per rollout.
        update: Forward passes, backward passes and optimizer steps.
    """

    sync: Range
    generate: Range
    score: Range
    update: Range

    @property
    def total(self) -> Range:
        """Seconds of the whole step."""
        return self.sync + self.generate + self.score + self.update

    @property
    def rollout_share(self) -> float:
        """Share of generation and sync in the step: an upper bound on what faster rollouts can save."""
        return (self.generate.middle + self.sync.middle) / self.total.middle


@dataclass(frozen=True)
class Comparison:
    """Gain of a format over 16-bit rollouts.

    Attributes:
        step: Predicted step in this format.
        speedup: Speed-up of the step.
        rollout_speedup: Speed-up of generation alone.
        bytes_saved: Reduction of the engine's weights.
        break_even: Shortest completion length at which a step is faster; 1 if it always is, `None` if never.
        training_limit: Only if scoring and updates were not measured: the most seconds they may take for a worthwhile
            speed-up. `speedup` then covers rollout and sync only, an upper bound on that of a step.
    """

    step: Step
    speedup: Range
    rollout_speedup: float
    bytes_saved: int
    break_even: int | None
    training_limit: float | None = None

    @property
    def advice(self) -> str:
        """`"yes"`, `"no"`, `"unclear"` if the range includes both, or `"depends"` on `training_limit`."""
        if self.training_limit is not None:
            return "depends" if self.training_limit > 0 else "no"
        if self.speedup.low >= WORTHWHILE:
            return "yes"
        return "no" if self.speedup.high < WORTHWHILE else "unclear"


def predict_step(engine: EngineCosts, training: TrainingCosts | None, workload: Workload) -> Step:
    """Predict a step: sync, rollout, a scoring pass if there are several updates, and the updates."""
    sync, generate = engine.sync.range, engine.generate(workload.completion_len)
    if training is None:
        return Step(sync, generate, NOTHING, NOTHING)
    tokens = workload.train_batch * (workload.prompt_len + workload.completion_len)
    passes = at_size(training.update, tokens).times(workload.passes)
    return Step(
        sync=sync,
        generate=generate,
        score=at_size(training.score, tokens).times(workload.passes if workload.updates > 1 else 0),
        update=passes + training.optimizer.range.times(workload.updates),
    )


def compare(
    baseline: EngineCosts, engine: EngineCosts, training: TrainingCosts | None, workload: Workload
) -> Comparison:
    """Compare a format with 16-bit rollouts.

    Scoring and updates take the same time in both steps, so their spread does not widen the range of the speed-up.
    Its bounds use the extremes of rollout and sync, and the medians of the rest.
    """
    before, after = predict_step(baseline, training, workload), predict_step(engine, training, workload)
    rest = before.score.middle + before.update.middle
    slow, fast = before.sync + before.generate, after.sync + after.generate
    pairs = zip(slow, reversed(fast), strict=True)  # the lowest speed-up: the fastest baseline, the slowest format
    return Comparison(
        step=after,
        speedup=Range(*((numerator + rest) / (denominator + rest) for numerator, denominator in pairs)),
        rollout_speedup=before.generate.middle / after.generate.middle,
        bytes_saved=baseline.weight_bytes - engine.weight_bytes,
        break_even=break_even(baseline, engine, workload.completion_len),
        # (slow + limit) / (fast + limit) = WORTHWHILE
        training_limit=(slow.middle - WORTHWHILE * fast.middle) / (WORTHWHILE - 1) if training is None else None,
    )


def break_even(baseline: EngineCosts, engine: EngineCosts, longest: int) -> int | None:
    """Find the shortest completion length at which quantized rollouts save more than their sync costs.

    Returns 1 if they pay off at every length, and `None` if at none up to 16 times `longest`.
    """

    def saves(tokens: int) -> bool:
        rollout = baseline.generate(tokens).middle - engine.generate(tokens).middle
        return rollout > engine.sync.range.middle - baseline.sync.range.middle

    lengths = range(1, 16 * longest + 1)
    if not saves(lengths[-1]):
        return None
    return 1 if saves(1) else lengths[bisect_left(lengths, True, key=saves)]
