"""The mismatch guard: when the alarm goes on and off, what it points to, and what training does then."""

import json
import math

import pytest
import torch
from accelerate import Accelerator
from conftest import needs_avx512
from support.configs import config
from transformers import TrainerControl, TrainerState

from benchmarks import guard as guard_benchmark
from benchmarks.objectives.one_run import write_short_log
from trl_qurl import QuRLRLOOConfig
from trl_qurl.rollout.mismatch import MismatchTally
from trl_qurl.trainers.guard import (
    CONTRADICTED,
    ESS,
    FUNCTION,
    KL,
    KL_ERROR,
    RATIO,
    ROUNDING,
    SAMPLING,
    STALE,
    TAIL,
    TOKENS,
    WINDOW,
    MismatchGuard,
)

QUIET = {KL: 0.001, KL_ERROR: 0.0, TAIL: 0.0, ESS: 1.0, RATIO: 1.0, CONTRADICTED: 0.0, TOKENS: 1e4}


def new_guard(kl: float = 0.1, cap: float | None = 2.0, **settings) -> MismatchGuard:
    args = config(mismatch_guard_kl=kl, **settings)
    args.importance_cap = cap
    return MismatchGuard(args)


def observed(guard: MismatchGuard, *rollouts: dict[str, float]) -> list[list[str]]:
    """The metrics that each rollout finds beyond their limits."""
    findings = [guard.judge(QUIET | rollout) for rollout in rollouts]
    return [[text.removeprefix("the median of ").split()[0] for text, _ in rollout] for rollout in findings]


def advice(guard: MismatchGuard, *rollouts: dict[str, float]) -> str:
    """What the first alarm advises."""
    return next(found[0][1] for rollout in rollouts if (found := guard.judge(QUIET | rollout)))


# One rollout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rollout", "finding"),
    [
        ({KL: 0.0999}, []),
        ({KL: 0.1}, [KL]),
        ({KL: 0.14, KL_ERROR: 0.0101}, []),  # 0.14 - 4 * 0.0101 < 0.1
        ({KL: 0.14, KL_ERROR: 0.0099}, [KL]),
        # A mean of 0.9 from tokens that differ by nothing: ESS is 1, and the error (1 - 0.9) / sqrt(tokens).
        ({RATIO: 0.9, TOKENS: 65}, [RATIO]),  # 0.1 - 4 * 0.1 / sqrt(65) > 0.05
        ({RATIO: 0.9, TOKENS: 63}, []),
        ({RATIO: 1.1, TOKENS: 65}, [RATIO]),
        ({RATIO: 0.951, TOKENS: 1e9}, []),
        # mean(rho^2) = 0.81 / 0.9 = 0.9, so the error is sqrt((0.9 - 1.8 + 1) / tokens) = 0.316 / sqrt(tokens).
        ({RATIO: 0.9, ESS: 0.9, TOKENS: 630}, []),
        ({RATIO: 0.9, ESS: 0.9, TOKENS: 650}, [RATIO]),
        ({CONTRADICTED: 0.02, TOKENS: 1000}, [CONTRADICTED]),  # 20 tokens, less 4 * sqrt(20), are 2.1: 0.0021
        ({CONTRADICTED: 0.02, TOKENS: 950}, []),
    ],
)
def test_the_first_rollout_is_judged(rollout, finding):
    assert observed(new_guard(), rollout) == [finding]


def test_a_jump_is_three_times_the_largest_so_far():
    guard = new_guard()
    assert observed(guard, {KL: 0.0004}, {KL: 0.0049}) == [[], []], "below what counts as a jump"
    assert observed(guard, {KL: 0.002}, {KL: 0.0146}) == [[], []], "three times 0.0049"
    assert observed(new_guard(), {KL: 0.0049}, {KL: 0.0148}) == [[], [KL]]
    assert observed(new_guard(), {KL: 0.0049}, {KL: 0.038, KL_ERROR: 0.006}) == [[], []]
    assert observed(new_guard(), {KL: 0.0001}, {KL: 0.005}) == [[], [KL]]
    assert observed(new_guard(), {KL: 0.09}, {KL: 0.1}) == [[], [KL]], "the setting is a limit, too"


def test_a_rollout_with_a_finding_is_no_measure_for_the_next():
    guard = new_guard()
    assert observed(guard, {}, {KL: 0.05}, *[{}] * WINDOW, {KL: 0.05}) == [[], [KL], *[[]] * WINDOW, [KL]]


def test_rollouts_ahead_may_jump():
    """The first one is of the weights that score it, all others are one rollout old."""
    guard = new_guard(rollouts_ahead=1, vllm_mode="server")
    assert observed(guard, {KL: 0.0002}, {KL: 0.09}, {KL: 0.1}) == [[], [], [KL]]


def test_few_tokens_prove_nothing():
    """Healthy rollouts of 1 to 64 tokens: log rho is normal, of mean -s^2/2, so that the mean of rho is 1."""
    torch.manual_seed(0)
    tally = MismatchTally(Accelerator(cpu=True))
    for tokens in (1, 2, 4, 16, 64):
        guard = new_guard()
        for _ in range(500):
            spread = 0.02 if torch.rand(()) < 0.9 else 0.2  # most rollouts agree, some do not
            log_ratio = torch.randn(1, tokens) * spread - spread**2 / 2
            if torch.rand(()) < 0.1:
                log_ratio[0, 0] = -3.0  # a near tie
            tally.add(log_ratio - 0.5, torch.full((1, tokens), -0.5), torch.ones(1, tokens, dtype=torch.bool), 2.0)
            assert not guard.judge(tally.pop()), f"{tokens} tokens"


def test_tokens_that_contradict_each_other_are_found_among_thousands():
    torch.manual_seed(0)
    tally, behavior = MismatchTally(Accelerator(cpu=True)), torch.full((8, 512), -0.5)
    proximal = behavior + 0.02 * torch.randn(8, 512)
    proximal[:, :8] = -3.0  # 64 of 4096, 2.5 nats below
    tally.add(proximal, behavior, torch.ones(8, 512, dtype=torch.bool), 2.0)
    metrics = tally.pop()
    assert metrics[CONTRADICTED] == 64 / 4096 and metrics[TOKENS] == 4096
    assert [text.split()[0] for text, _ in new_guard().judge(metrics)] == [CONTRADICTED]


def test_the_pattern_says_where_to_look():
    assert advice(new_guard(), {RATIO: 0.1, KL: 1.0}) == SAMPLING
    assert advice(new_guard(), {KL: 0.2, CONTRADICTED: 0.1}) == FUNCTION, "from the first rollout on"
    assert advice(new_guard(), {CONTRADICTED: 0.1}) == FUNCTION
    assert advice(new_guard(), {}, {KL: 0.2}) == advice(new_guard(), {}, {CONTRADICTED: 0.1}) == STALE
    assert advice(new_guard(), {KL: 0.09}, {KL: 0.11}) == advice(new_guard(), *[{TAIL: 0.1}] * WINDOW) == ROUNDING
    assert advice(new_guard(rollout_quantization=None), *[{TAIL: 0.1}] * WINDOW) == FUNCTION


def test_an_evaluation_is_judged_and_changes_no_median():
    guard = new_guard()
    assert not any(guard.judge(QUIET | {TAIL: 0.1}, training=False) for _ in range(2 * WINDOW))
    assert observed(guard, *[{TAIL: 0.1}] * WINDOW) == [*[[]] * (WINDOW - 1), [TAIL]]
    guard = new_guard()
    guard.judge(QUIET, training=False)
    assert guard.judge(QUIET | {KL: 0.05}, training=False)[0][1] == STALE
    for _ in range(2 * WINDOW):
        guard.judge(QUIET, training=False)
    assert guard.alarm, "it ends with rollouts of training"


# Drift ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("metric", "below", "beyond"), [(TAIL, 0.0099, 0.01), (ESS, 0.8501, 0.85)])
def test_the_median_of_five_rollouts_decides(metric, below, beyond):
    guard = new_guard()
    # Two beyond and two below leave the median of five to the fifth; with three of five beyond, it is beyond.
    assert observed(guard, *[{metric: value} for value in (beyond, beyond, below, below)]) == [[]] * 4
    assert observed(guard, {metric: below}, {metric: beyond}, {metric: beyond}) == [[], [], []]
    assert observed(guard, {metric: beyond}) == [[metric]]  # of below, below, beyond, beyond, beyond
    assert guard.alarm


def test_what_is_found_says_the_median_and_the_threshold():
    guard = new_guard()
    # Sorted ESS: .2 .4 .5 .9 nan, which counts as worst, so that .4 is in the middle.
    for ess in (0.9, 0.5, math.nan, 0.4):
        assert guard.judge(QUIET | {ESS: ess}) == []
    assert guard.judge(QUIET | {ESS: 0.2}) == [(f"the median of {ESS} is 0.4 (threshold 0.85)", ROUNDING)]


@pytest.mark.parametrize("outlier", [math.inf, math.nan])
def test_outliers_raise_no_alarm(outlier):
    guard = new_guard()
    bad = {KL: outlier, KL_ERROR: outlier, TAIL: outlier, ESS: outlier, RATIO: math.nan}
    assert not any(observed(guard, *[{}, bad, {}, {}, bad] * 10)) and not guard.alarm
    assert observed(guard, bad) == [[TAIL, ESS]]  # the third of five
    assert observed(new_guard(), {}, bad, {KL: 0.006}) == [[], [], [KL]], "they are no measure for a jump"


def test_the_alarm_goes_off_after_five_rollouts_without_a_finding():
    guard = new_guard()
    assert observed(guard, {}, {KL: 0.2}) == [[], [KL]]
    # A second finding adds no warning, and the count begins again.
    assert observed(guard, *[{}] * (WINDOW - 1), {RATIO: 0.5}, *[{}] * (WINDOW - 1)) == [[]] * (2 * WINDOW - 1)
    assert guard.alarm
    assert observed(guard, {}) == [[]] and not guard.alarm
    assert observed(guard, {KL: 0.2}) == [[KL]]


@pytest.mark.parametrize(("cap", "is_tail"), [(1.2, False), (1.999, False), (2.0, True), (10.0, True), (None, True)])
def test_what_is_above_a_small_cap_is_no_tail(cap, is_tail):
    assert observed(new_guard(cap=cap), *[{TAIL: 0.06}] * WINDOW)[-1] == ([TAIL] if is_tail else [])


def test_a_rollout_without_tokens_changes_nothing():
    guard = new_guard()
    observed(guard, *[{TAIL: 1.0}] * (WINDOW - 1))
    assert guard.judge({}) == guard.judge({"mismatch/invalid_share": 0.0}) == [] and not guard.alarm
    assert observed(guard, {TAIL: 1.0}) == [[TAIL]]
    assert guard.judge({}) == [] and guard.alarm


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


def test_one_warning_per_alarm_says_what_to_do(caplog):
    guard = new_guard(kl=0.05)
    kls = [0.04, *[0.06] * 2, *[0.01] * WINDOW, 0.07]
    with caplog.at_level("WARNING"):
        logged = [guard.observe(QUIET | {KL: kl})["mismatch/guard"] for kl in kls]
    assert logged == [0, 1, 1, 1, 1, 1, 1, 0, 1]
    first, second = (record.getMessage() for record in caplog.records if record.name == "trl_qurl.trainers.guard")
    for part in ("mismatch/kl_k3 is 0.06 (threshold 0.05)", "objective='tis'", "--kl 5e-3", "mismatch_guard='stop'"):
        assert part in first
    assert "mismatch/kl_k3 is 0.07" in second
    control = TrainerControl()
    guard.on_step_end(None, TrainerState(), control)
    assert not control.should_training_stop and not control.should_save


@pytest.mark.parametrize("ahead", [0, 1])
def test_old_weights_are_named_only_where_there_are_some(ahead, caplog):
    guard = new_guard(rollouts_ahead=ahead, vllm_mode="server")
    for kl in (0.09, 0.11):
        guard.observe(QUIET | {KL: kl})
    assert ("set rollouts_ahead=0" in caplog.text) == bool(ahead)


def test_a_stop_saves_also_where_an_evaluation_would_decide():
    guard, control = new_guard(mismatch_guard="stop"), TrainerControl(should_evaluate=True)
    args = QuRLRLOOConfig("out", use_cpu=True, bf16=False)
    guard.on_step_end(args, TrainerState(), control)
    assert not control.should_training_stop
    guard.observe(QUIET | {KL: 1.0})
    guard.on_step_end(args, TrainerState(), control)
    assert control.should_training_stop and control.should_save and not control.should_evaluate


# Training ------------------------------------------------------------------------------------------------------------

STOP = {"mismatch_guard": "stop", "mismatch_guard_kl": 1e-9, "max_steps": 20, "beta": 0.0}


@pytest.mark.vllm
@pytest.mark.xdist_group("guard")
@needs_avx512
def test_a_stop_leaves_a_checkpoint_that_resumes_in_16_bits(train, tmp_path):
    # Two updates per rollout: the first rollout is that of steps 1 and 2.
    checkpoint = tmp_path / "stop" / "checkpoint-1"
    unquantized = {"rollout_quantization": None, "mismatch_guard_kl": 0.1, "max_steps": 4}
    stopped, resumed = train(
        [tmp_path / "stop", "--config", json.dumps(STOP | {"rollout_quantization": "w4a16"}), "--rloo"],
        [tmp_path / "resumed", "--config", json.dumps(STOP | unquantized), "--rloo", "--resume", checkpoint],
    )
    assert rollouts(stopped, "mismatch/guard") == [1]
    assert [path.name for path in (tmp_path / "stop").glob("checkpoint-*")] == ["checkpoint-1"]
    assert stopped["history"][-1]["step"] == 1
    # The rollout in progress serves step 2; the next one comes from the policy's own weights.
    assert rollouts(resumed, "mismatch/guard") == [1, 0] and resumed["history"][-1]["step"] == 4
    w4a16, unrounded = rollouts(resumed, "mismatch/kl_k3")
    assert unrounded < 1e-5 and w4a16 > 2e-5


def rollouts(record, metric):
    return [row[metric] for row in record["history"] if "reward" in row]


@pytest.mark.vllm
@pytest.mark.xdist_group("guard")
@needs_avx512
@pytest.mark.parametrize("kind", ["GRPO", pytest.param("RLOO", marks=pytest.mark.slow)])
def test_planted_faults_are_found_and_told_apart(run_scenario, tmp_path, kind):
    record = run_scenario("planted.py", tmp_path, kind)
    assert record["training"]["guard"] == [0, 0, 0]
    for healthy in ("training", "evaluation", "synced again"):
        assert record[healthy]["warnings"] == []
    for fault, metric, where in (
        ("a sync is skipped", KL, STALE),
        ("other weights from the start", KL, FUNCTION),
        ("structured outputs", RATIO, SAMPLING),
    ):
        [warning] = record[fault]["warnings"]
        assert metric in warning and where in warning, fault
        assert record[fault]["mismatch/guard"] == 1


# Stored runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def groups():
    return guard_benchmark.replay_all(guard_benchmark.RESULTS, guard_benchmark.REAL_RESULTS)


def test_no_healthy_run_of_the_study_raises_an_alarm(groups):
    healthy = [group for group in groups if group.expected == guard_benchmark.HEALTHY]
    assert sum(len(group.first_alarms) for group in healthy) >= 175
    assert {"bf16", "int8_acr"} <= {group.arm for group in healthy if group.experiment == "real arithmetic"}
    assert not {f"{group.experiment}/{group.arm}" for group in healthy if any(group.first_alarms)}
    # With room to spare: a tenth of the way to each threshold, at least.
    assert max(group.farthest[KL] for group in healthy) < 0.06
    assert max(group.farthest[TAIL] for group in healthy) < 0.009
    assert min(group.farthest[ESS] for group in healthy) > 0.865


def test_all_harmed_runs_of_the_study_raise_one(groups):
    by_kind = {kind: [group for group in groups if group.expected == kind] for kind in guard_benchmark.EXPECTED}
    for kind, at_least in ((guard_benchmark.COLLAPSING, 5), (guard_benchmark.HARMED, 120)):
        first = [alarm for group in by_kind[kind] for alarm in group.first_alarms]
        assert len(first) >= at_least and None not in first
    assert "int3_quantized_ratio" in {group.arm for group in by_kind[guard_benchmark.COLLAPSING]}


def test_a_healthy_run_with_an_alarm_is_an_error(tmp_path, capsys):
    rows = [{"step": 4 * i, KL: 0.05 * i, TAIL: 0.0, ESS: 0.99} for i in range(1, 8)]
    settings = {"seed": 0, "rollout_quantization": "int8", "vllm_importance_sampling_clip_max": 2.0}
    (tmp_path / "real").mkdir()
    for arm, status in (("int3_tis", 0), ("int8_tis", 1)):
        write_short_log(settings, rows, tmp_path / "main" / f"{arm}-seed0.jsonl.gz")
        paths = ["--runs", str(tmp_path), "--real-runs", str(tmp_path / "real"), "-o", str(tmp_path / "out.json")]
        assert guard_benchmark.main(paths) == status
    printed = capsys.readouterr().out
    assert "An alarm in a healthy run: main/int8_tis" in printed and "main/int3_tis" not in printed
    [int3, int8] = json.loads((tmp_path / "out.json").read_text())["results"]
    assert int3["first_alarms"] == int8["first_alarms"] == [2] and int8["farthest"][KL] == pytest.approx(0.35)
