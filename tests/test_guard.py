"""The mismatch guard: when its alarm starts and ends, the advice it gives, and what training does
then.
"""

import math

import pytest
from conftest import needs_avx512
from support.building import SETTINGS
from transformers import TrainerControl, TrainerState

from benchmarks import guard as guard_benchmark
from trl_qurl import QuRLGRPOConfig
from trl_qurl.trainers.checks import guard as module
from trl_qurl.trainers.checks.guard import (
    CONTRADICTED,
    ESS,
    KL,
    KL_ERROR,
    RATIO,
    TAIL,
    TOKENS,
    WINDOW,
    MismatchGuard,
)

QUIET = {
    KL: 0.001,
    KL_ERROR: 0.0,
    TAIL: 0.0,
    ESS: 1.0,
    RATIO: 1.0,
    CONTRADICTED: 0.0,
    TOKENS: 1e4,
}


def new_guard(cap=2.0, **settings):
    args = QuRLGRPOConfig("out", **SETTINGS | settings)
    args.importance_cap = cap
    return MismatchGuard(args)


def row_of(rollout):
    """A quiet rollout with other metrics, or only another KL."""
    if not isinstance(rollout, dict):
        rollout = {KL: rollout}
    return QUIET | rollout


def observed(guard, *rollouts):
    """By rollout, the metrics beyond their limits."""
    found = []
    for rollout in rollouts:
        metrics = []
        for text, _ in guard.judge(row_of(rollout)):
            metric, *_ = text.removeprefix("the median of ").split()
            metrics.append(metric)
        found.append(metrics)
    return found


def test_a_guard_that_is_off_neither_warns_nor_logs(caplog):
    assert new_guard(mismatch_guard="off").observe(row_of(1.0)) == {}
    for record in caplog.records:
        assert not record.name.startswith("trl_qurl")


# Rollouts of training
# --------------------------------------------------------------------------------------------------

FOUR = [QUIET] * (WINDOW - 1)
UNKNOWN = dict.fromkeys([KL, KL_ERROR, TAIL, ESS, RATIO], math.nan)
INFINITE = dict.fromkeys([KL, KL_ERROR, TAIL, ESS], math.inf)


def tails(*counts):
    """Rollouts with this many of 160 tokens in the tail."""
    return [{TAIL: count / 160} for count in counts]


def drifting(metric, beyond, within):
    """Eight rollouts, of which only the last five have three beyond a limit."""
    values = [*[beyond] * 2, *[within] * 3, *[beyond] * 3]
    return [{metric: value} for value in values]


# Rollouts, and which of them are beyond the limit of a metric.
HISTORIES = [
    ([0.0999], KL, []),
    ([0.1], KL, [0]),
    ([{KL: 0.12, KL_ERROR: 0.0101}], KL, []),  # 0.12 - 2 * 0.0101 < 0.1
    ([{KL: 0.12, KL_ERROR: 0.0099}], KL, [0]),
    # A mean of 1.1 from tokens that differ by nothing: ESS is 1, and the error (1.1 - 1) /
    # sqrt(tokens).
    ([{RATIO: 1.1, TOKENS: 65}], RATIO, [0]),  # 0.1 - 4 * 0.1 / sqrt(65) > 0.05
    ([{RATIO: 0.951, TOKENS: 1e9}], RATIO, []),
    # mean(rho^2) = 0.81 / 0.9 = 0.9, so the error is sqrt((0.9 - 1.8 + 1) / tokens) = 0.316 /
    # sqrt(tokens).
    ([{RATIO: 0.9, ESS: 0.9, TOKENS: 630}], RATIO, []),
    ([{RATIO: 0.9, ESS: 0.9, TOKENS: 650}], RATIO, [0]),
    ([{CONTRADICTED: 0.02, TOKENS: 1000}], CONTRADICTED, [0]),
    # 0.0149 < 3 * 0.005; a run's largest KL counts as 0.005 at least
    ([0.0004, 0.0049, 0.002, 0.0149], KL, []),
    ([0.0001, 0.0151], KL, [1]),
    ([0.01, 0.031], KL, [1]),  # three times the run's largest
    ([0.0049, {KL: 0.02, KL_ERROR: 0.0013}], KL, []),  # four standard errors are noise
    ([0.0049, {KL: 0.02, KL_ERROR: 0.0012}], KL, [1]),
    ([0.09, 0.1], KL, [1]),  # the setting is a limit too
    # What a fault explains is not compared with; what only jumps is, from then on.
    ([0.001, 0.05, *[0.001] * WINDOW, 0.05], KL, [1, WINDOW + 2]),
    ([0.001, 0.02, *[0.001] * WINDOW, 0.05], KL, [1]),
    ([0.001, {KL: math.nan, RATIO: math.nan}, 0.016], KL, [2]),
    # The alarm ends after five rollouts without a finding. Another finding adds no warning, and the
    # count begins again.
    ([0.001, 0.2, *FOUR, {RATIO: 0.5}, *FOUR, 0.2], KL, [1]),
    ([0.001, 0.2, *FOUR, {RATIO: 0.5}, *FOUR, QUIET, 0.2], KL, [1, 12]),
    (drifting(TAIL, 0.0102, 0.0099), TAIL, [7]),
    (drifting(ESS, 0.85, 0.8501), ESS, [7]),
    # Outliers raise no alarm, and count as the worst.
    ([QUIET, INFINITE, QUIET, QUIET, INFINITE] * 9, TAIL, []),
    ([QUIET, UNKNOWN, QUIET, QUIET, UNKNOWN] * 9, TAIL, []),
    ([QUIET, {TAIL: math.inf}, QUIET, {TAIL: math.nan}, {TAIL: math.nan}], TAIL, [4]),
    (tails(2, 0, 2, 2, 0) * 3, TAIL, []),  # two tokens of a small rollout are no tail
    (tails(1, 2, 1, 2, 2), TAIL, [4]),
]


@pytest.mark.parametrize(("rollouts", "metric", "numbers"), HISTORIES)
def test_rollouts_beyond_a_limit_are_found(rollouts, metric, numbers):
    found = observed(new_guard(), *rollouts)
    assert found == [[metric] * (number in numbers) for number in range(len(rollouts))]


@pytest.mark.parametrize(
    ("rollout", "advice"),
    [({RATIO: 0.1, KL: 1.0}, module.SAMPLING), (0.6, module.FUNCTION), (0.2, module.ROUNDING)],
)
def test_advice_depends_on_the_pattern(rollout, advice):
    assert new_guard().judge(row_of(rollout))[0].advice == advice


def test_tail_is_not_judged_with_a_cap_below_2():
    tail = [{TAIL: 0.06}] * WINDOW
    assert not any(observed(new_guard(1.999), *tail))
    for cap in (2.0, None):
        assert observed(new_guard(cap), *tail)[-1] == [TAIL]


def test_an_evaluation_is_judged_without_changing_medians():
    guard = new_guard()
    for _ in range(WINDOW):
        assert not guard.judge(row_of({TAIL: 0.1}), training=False)
    *before, last = observed(guard, *[{TAIL: 0.1}] * WINDOW)
    assert not any(before)
    assert last == [TAIL]
    guard = new_guard()
    guard.judge(QUIET, training=False)
    # It has other prompts, so its limits are twice as high.
    assert not guard.contradiction(row_of(0.049), training=False)
    assert guard.contradiction(row_of(0.051), training=False)
    assert not guard.judge(row_of(0.029), training=False)
    assert guard.judge(row_of(0.2), training=False)
    for _ in range(WINDOW):
        guard.judge(QUIET, training=False)
    assert guard.alarm, "it ends with rollouts of training"


def test_a_rollout_without_tokens_changes_nothing():
    guard = new_guard()
    observed(guard, *[{TAIL: 1.0}] * (WINDOW - 1))
    assert guard.judge({}) == []
    assert observed(guard, {TAIL: 1.0}) == [[TAIL]]
    assert guard.judge({}) == []
    assert guard.alarm


# Contradictions
# --------------------------------------------------------------------------------------------------


UNQUANTIZED = {"rollout_quantization": None}


@pytest.mark.parametrize(
    ("settings", "before", "rollout", "limit"),
    [
        # Before there is a history, the limit is that of the format.
        ({}, [], {KL: 0.52, KL_ERROR: 0.0099}, 0.5),
        ({"rollout_quantization": {"re:.*down_proj": "w4a16", "*": "int8"}}, [], 3.01, 3),
        (UNQUANTIZED, [], 0.11, 0.1),
        (UNQUANTIZED | {"vllm_engine_kwargs": {"kv_cache_dtype": "fp8"}}, [], 0.49, None),
        # Five times the largest so far, and at least 0.025.
        ({}, [0.02, 0.01], {KL: 0.12, KL_ERROR: 0.0099}, 0.1),
        ({}, [0.0001], 0.0251, 0.025),
        # A difference that grows step by step, as that of an engine that keeps its first weights
        # does, does not become usual.
        ({}, [0.02 * 1.2**step for step in range(18)], 0.51, 0.43),
        # 20 tokens, less 4 * sqrt(20), are 2.11: 0.0021
        ({}, [], {CONTRADICTED: 0.02, TOKENS: 900}, None),
        # A low temperature sharpens the noise of rounding.
        ({"temperature": 0.1}, [], {KL: 4.9, CONTRADICTED: 0.2}, None),
        ({"temperature": 0.1}, [], 5.1, 5),
        ({"temperature": 2.0}, [], 0.51, 0.5),
        # Tokens of a cut distribution show nothing.
        ({"top_k": 5}, [], {KL: 3.0, CONTRADICTED: 0.9, RATIO: 0.1}, None),
    ],
)
def test_what_neither_rounding_nor_an_update_explains(settings, before, rollout, limit):
    guard = new_guard(**settings)
    observed(guard, *before)
    found = guard.contradiction(row_of(rollout))
    if limit is None:
        assert not found
    else:
        assert f"at most {limit} would" in found


# Warnings and stops
# --------------------------------------------------------------------------------------------------


def test_one_warning_per_alarm_says_what_to_do(caplog):
    guard = new_guard(mismatch_guard_kl=0.05)
    kls = [0.04, *[0.06] * 2, *[0.01] * WINDOW, 0.07]
    with caplog.at_level("WARNING", "trl_qurl.trainers.checks.guard"):
        logged = [guard.observe(row_of(kl))["mismatch/guard"] for kl in kls]
    assert logged == [0, 1, 1, 1, 1, 1, 1, 0, 1]
    first, second = (text for text in caplog.messages if KL in text)
    for part in (f"{KL} is 0.06 (threshold 0.05)", module.ROUNDING, "mismatch_guard='stop'"):
        assert part in first
    assert f"{KL} is 0.07" in second
    control = TrainerControl()
    guard.on_step_end(None, TrainerState(), control)
    assert not control.should_training_stop
    assert not control.should_save


def test_a_stop_saves_without_an_evaluation():
    guard = new_guard(mismatch_guard="stop")
    control = TrainerControl(should_evaluate=True)
    for kl, stops in ((0.0, False), (1.0, True)):
        guard.observe(row_of(kl))
        guard.on_step_end(QuRLGRPOConfig("out", **SETTINGS), TrainerState(), control)
        assert control.should_training_stop == control.should_save == stops
    assert not control.should_evaluate


# Training
# --------------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.xdist_group("guard")
@needs_avx512
def test_a_stop_leaves_a_checkpoint_that_resumes_in_16_bits(train, tmp_path):
    # Two updates per rollout: the first rollout is that of steps 1 and 2.
    checkpoint = tmp_path / "stop" / "checkpoint-1"
    stop = {
        "mismatch_guard": "stop",
        "mismatch_guard_kl": 1e-9,
        "max_steps": 20,
        "beta": 0.0,
        "rollout_quantization": "w4a16",
    }
    resume = stop | UNQUANTIZED | {"mismatch_guard_kl": 0.1, "max_steps": 4}
    stopped, resumed = train(
        [tmp_path / "stop", "--rloo", stop],
        [tmp_path / "on", "--rloo", resume, "--resume", checkpoint],
    )
    assert rollouts(stopped, "mismatch/guard") == [1]
    assert [path.name for path in (tmp_path / "stop").glob("checkpoint-*")] == ["checkpoint-1"]
    assert stopped["history"][-1]["step"] == 1
    # The rollout in progress serves step 2; the next one comes from the policy's own weights.
    assert rollouts(resumed, "mismatch/guard") == [1, 0]
    assert resumed["history"][-1]["step"] == 4
    w4a16, unrounded = rollouts(resumed, KL)
    assert unrounded < 1e-5
    assert w4a16 > 2e-5


def rollouts(record, metric):
    return [row[metric] for row in record["history"] if "reward" in row]


# Stored runs
# --------------------------------------------------------------------------------------------------


def test_stored_runs_raise_an_alarm_if_they_were_harmed_and_only_then():
    groups = guard_benchmark.replay_all(guard_benchmark.RESULTS, guard_benchmark.REAL_RESULTS)
    raises = {
        guard_benchmark.HEALTHY: False,
        guard_benchmark.HARMED: True,
        guard_benchmark.COLLAPSING: True,
    }
    judged = [group for group in groups if group.expected in raises]
    assert sum(len(group.first_alarms) for group in judged) >= 438
    wrong = []
    for group in judged:
        for alarm in group.first_alarms:
            if raises[group.expected] == (alarm is None):
                wrong.append(group.arm)
    assert wrong == ["int3_tis_centered"]  # its tail stays below the limit on average
