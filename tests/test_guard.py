"""The mismatch guard: when the alarm goes on and off, and what training does then."""

import json
import math

import pytest
from conftest import needs_avx512
from test_config import config
from transformers import TrainerControl, TrainerState

from benchmarks import guard as guard_benchmark
from benchmarks.objectives.one_run import write_short_log
from trl_qurl import QuRLRLOOConfig
from trl_qurl.trainers.guard import ESS, KL, TAIL, WINDOW, MismatchGuard, MismatchGuardCallback

QUIET = {KL: 0.001, TAIL: 0.0, ESS: 0.999}


def observed(guard: MismatchGuard, *rollouts: dict[str, float]) -> list[list[str]]:
    """The metrics that each rollout finds beyond their thresholds."""
    return [[finding.split()[0] for finding in guard.observe(QUIET | rollout)] for rollout in rollouts]


# When ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("metric", "below", "beyond"), [(KL, 0.0999, 0.1), (TAIL, 0.0099, 0.01), (ESS, 0.8501, 0.85)])
def test_the_median_of_five_rollouts_decides(metric, below, beyond):
    guard = MismatchGuard(kl=0.1, cap=2.0)
    # Two beyond and two below leave the median of five to the fifth; with three of five beyond, it is beyond.
    assert observed(guard, *[{metric: value} for value in (beyond, beyond, below, below)]) == [[]] * 4
    assert observed(guard, {metric: below}, {metric: beyond}, {metric: beyond}) == [[], [], []]
    assert observed(guard, {metric: beyond}) == [[metric]]  # of below, below, beyond, beyond, beyond
    assert guard.alarm


def test_what_is_found_says_the_median_and_the_threshold():
    guard = MismatchGuard(kl=0.02, cap=2.0)
    # Sorted KLs: .01 .02 .05 .3 inf; ESS: .2 .4 .5 .9 nan, which counts as worst, so that .4 is in the middle.
    for kl, ess in ((0.01, 0.9), (math.inf, 0.5), (0.05, math.nan), (0.3, 0.4)):
        assert guard.observe({KL: kl, ESS: ess, TAIL: 0.0}) == []
    expected = [f"{KL} is 0.05 (threshold 0.02)", f"{ESS} is 0.4 (threshold 0.85)"]
    assert guard.observe({KL: 0.02, ESS: 0.2, TAIL: 0.0}) == expected


@pytest.mark.parametrize("outlier", [1e6, math.inf, math.nan])
def test_outliers_raise_no_alarm(outlier):
    guard = MismatchGuard(kl=0.1)
    bad = {KL: outlier, TAIL: outlier, ESS: -outlier}
    assert not any(observed(guard, *[{}, bad, {}, {}, bad] * 10)) and not guard.alarm
    assert observed(guard, bad) == [[KL, ESS, TAIL]]  # the third of five


def test_the_alarm_goes_off_at_half_the_thresholds_only():
    guard = MismatchGuard(kl=0.1)
    assert observed(guard, *[{KL: 0.2}] * WINDOW)[-1] == [KL]
    # Between half and whole it stays on, and a second threshold adds no warning.
    assert observed(guard, *[{KL: 0.051, ESS: 0.5}] * WINDOW, *[{ESS: 0.924}] * WINDOW) == [[]] * 2 * WINDOW
    assert guard.alarm
    assert observed(guard, *[{KL: 0.049, ESS: 0.926, TAIL: 0.0049}] * 2) == [[], []] and guard.alarm
    assert observed(guard, {KL: 0.049, ESS: 0.926, TAIL: 0.0049}) == [[]] and not guard.alarm
    assert observed(guard, *[{KL: 0.2}] * 3)[-1] == [KL], "a second alarm says nothing"


@pytest.mark.parametrize(("cap", "is_tail"), [(1.2, False), (1.999, False), (2.0, True), (10.0, True), (None, True)])
def test_what_is_above_a_small_cap_is_no_tail(cap, is_tail):
    guard = MismatchGuard(kl=0.1, cap=cap)
    assert observed(guard, *[{TAIL: 0.06}] * WINDOW)[-1] == ([TAIL] if is_tail else [])


def test_a_rollout_without_tokens_changes_nothing():
    guard = MismatchGuard(kl=0.1)
    observed(guard, *[{KL: 1.0}] * (WINDOW - 1))
    assert guard.observe({}) == [] and not guard.alarm
    assert observed(guard, {KL: 1.0}) == [[KL]]
    assert guard.observe({}) == [] and guard.alarm


# Settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mismatch_guard": "stopp"}, "must be one of 'off', 'warn', 'stop'; did you mean 'stop'"),
        ({"mismatch_guard_kl": 0.0}, "mismatch_guard_kl is 0.0, but must be positive and finite"),
        ({"mismatch_guard_kl": math.inf}, "mismatch_guard_kl is inf"),
        ({"mismatch_guard_kl": math.nan}, "mismatch_guard_kl is nan"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


def test_rloo_has_the_guard():
    assert QuRLRLOOConfig("out", use_cpu=True, bf16=False).mismatch_guard == "warn"


# What is done --------------------------------------------------------------------------------------------------------


def callback(**settings):
    return MismatchGuardCallback(config(**settings))


def test_one_warning_per_alarm_says_what_to_do(caplog):
    guard = callback(mismatch_guard_kl=0.05)
    with caplog.at_level("WARNING"):
        logged = [guard.observe(QUIET | {KL: kl})["mismatch/guard"] for kl in [0.06] * 7 + [0.01] * 3 + [0.07] * 5]
    # Off with the third small KL, on again with the third large one.
    assert logged == [0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1]
    first, second = (record.getMessage() for record in caplog.records if record.name == "trl_qurl.trainers.guard")
    for part in ("mismatch/kl_k3 is 0.06 (threshold 0.05)", "objective='tis'", "--kl 5e-3", "mismatch_guard='stop'"):
        assert part in first
    assert "mismatch/kl_k3 is 0.07" in second
    control = TrainerControl()
    guard.on_step_end(None, TrainerState(), control)
    assert not control.should_training_stop and not control.should_save


@pytest.mark.parametrize("settings", [{"rollout_quantization": None}, {"round_base": True}])
def test_rounding_is_not_blamed_where_there_is_none(settings, caplog):
    guard = callback(**settings)
    for _ in range(WINDOW):
        guard.observe(QUIET | {KL: 1.0})
    assert "top_p" in caplog.text and "finer" not in caplog.text


@pytest.mark.parametrize("ahead", [0, 1])
def test_old_weights_are_named_only_where_there_are_some(ahead, caplog):
    guard = callback(rollouts_ahead=ahead, vllm_mode="server")
    for _ in range(WINDOW):
        guard.observe(QUIET | {KL: 1.0})
    assert ("set rollouts_ahead=0" in caplog.text) == bool(ahead)


def test_a_stop_saves_also_where_an_evaluation_would_decide():
    guard, control = callback(mismatch_guard="stop"), TrainerControl(should_evaluate=True)
    for _ in range(WINDOW):
        guard.on_step_end(QuRLRLOOConfig("out", use_cpu=True, bf16=False), TrainerState(), control)
        assert not control.should_training_stop
        guard.observe(QUIET | {KL: 1.0})
    guard.on_step_end(QuRLRLOOConfig("out", use_cpu=True, bf16=False), TrainerState(), control)
    assert control.should_training_stop and control.should_save and not control.should_evaluate


# Training ------------------------------------------------------------------------------------------------------------

STOP = {"mismatch_guard": "stop", "mismatch_guard_kl": 1e-9, "max_steps": 20, "beta": 0.0}


@pytest.mark.vllm
@pytest.mark.xdist_group("guard")
@needs_avx512
def test_a_stop_leaves_a_checkpoint_that_resumes_in_16_bits(train, tmp_path):
    # Two updates per rollout: the fifth rollout is that of steps 9 and 10.
    checkpoint = tmp_path / "stop" / "checkpoint-9"
    unquantized = {"rollout_quantization": None, "mismatch_guard_kl": 0.1, "max_steps": 12}
    stopped, resumed = train(
        [tmp_path / "stop", "--config", json.dumps(STOP | {"rollout_quantization": "w4a16"}), "--rloo"],
        [tmp_path / "resumed", "--config", json.dumps(STOP | unquantized), "--rloo", "--resume", checkpoint],
    )
    assert rollouts(stopped, "mismatch/guard") == [0, 0, 0, 0, 1]
    assert [path.name for path in (tmp_path / "stop").glob("checkpoint-*")] == ["checkpoint-9"]
    assert stopped["history"][-1]["step"] == 9
    # The rollout in progress serves step 10; the next one comes from the policy's own weights.
    assert rollouts(resumed, "mismatch/guard") == [0, 0, 0, 0, 1, 0] and resumed["history"][-1]["step"] == 12
    kl = rollouts(resumed, "mismatch/kl_k3")
    assert min(kl[:5]) > 2e-5 and kl[5] < 1e-5, kl


def rollouts(record, metric):
    return [row[metric] for row in record["history"] if "reward" in row]


# Stored runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def groups():
    return guard_benchmark.replay_all(guard_benchmark.RESULTS, guard_benchmark.REAL_RESULTS)


def test_no_healthy_run_of_the_study_raises_an_alarm(groups):
    healthy = [group for group in groups if group.expected == guard_benchmark.HEALTHY]
    assert sum(len(group.first_alarms) for group in healthy) >= 149
    assert {"bf16", "int8_acr"} <= {group.arm for group in healthy if group.experiment == "real arithmetic"}
    assert not {f"{group.experiment}/{group.arm}" for group in healthy if any(group.first_alarms)}
    # With room to spare: a tenth of the way to each threshold, at least.
    assert max(group.farthest[KL] for group in healthy) < 0.09
    assert max(group.farthest[TAIL] for group in healthy) < 0.009
    assert min(group.farthest[ESS] for group in healthy) > 0.865


def test_all_harmed_runs_of_the_study_raise_one(groups):
    by_kind = {kind: [group for group in groups if group.expected == kind] for kind in guard_benchmark.EXPECTED}
    for kind, at_least in ((guard_benchmark.COLLAPSING, 5), (guard_benchmark.HARMED, 120)):
        first = [alarm for group in by_kind[kind] for alarm in group.first_alarms]
        assert len(first) >= at_least and None not in first
    assert "int3_quantized_ratio" in {group.arm for group in by_kind[guard_benchmark.COLLAPSING]}


def test_a_healthy_run_with_an_alarm_is_an_error(tmp_path, capsys):
    rows = [{"step": 4 * i, KL: 0.2, TAIL: 0.0, ESS: 0.99} for i in range(1, 8)]
    settings = {"seed": 0, "vllm_importance_sampling_clip_max": 2.0}
    (tmp_path / "real").mkdir()
    for arm, status in (("int3_tis", 0), ("int8_tis", 1)):
        write_short_log(settings, rows, tmp_path / "main" / f"{arm}-seed0.jsonl.gz")
        paths = ["--runs", str(tmp_path), "--real-runs", str(tmp_path / "real"), "-o", str(tmp_path / "out.json")]
        assert guard_benchmark.main(paths) == status
    printed = capsys.readouterr().out
    assert "An alarm in a healthy run: main/int8_tis" in printed and "main/int3_tis" not in printed
    [int3, int8] = json.loads((tmp_path / "out.json").read_text())["results"]
    assert int3["first_alarms"] == int8["first_alarms"] == [5] and int8["farthest"][KL] == pytest.approx(0.2)
