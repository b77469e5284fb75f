"""The mismatch guard: when its alarm starts and ends, the advice it gives, and what training does
then.
"""

import json
import math

import pytest
import torch
from accelerate import Accelerator
from conftest import needs_avx512
from support.building import SETTINGS
from transformers import TrainerControl, TrainerState

from benchmarks import guard as guard_benchmark
from benchmarks.objectives.one_run import write_short_log
from trl_qurl import QuRLGRPOConfig, QuRLRLOOConfig
from trl_qurl.rollout.errors import SyncError
from trl_qurl.rollout.mismatch import MismatchTally
from trl_qurl.trainers import guard as module
from trl_qurl.trainers.guard import (
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


def new_guard(kl: float = 0.1, cap: float | None = 2.0, **settings) -> MismatchGuard:
    args = QuRLGRPOConfig("out", **SETTINGS | {"mismatch_guard_kl": kl} | settings)
    args.importance_cap = cap
    return MismatchGuard(args)


def test_a_guard_that_is_off_neither_warns_nor_logs(caplog):
    guard = new_guard(mismatch_guard="off")
    assert guard.observe(QUIET | {KL: 1.0}) == {}
    assert not [record for record in caplog.records if record.name.startswith("trl_qurl")]


def observed(guard: MismatchGuard, *rollouts: dict[str, float]) -> list[list[str]]:
    """By rollout, the metrics beyond their limits."""
    findings = [guard.judge(QUIET | rollout) for rollout in rollouts]
    return [
        [text.removeprefix("the median of ").split()[0] for text, _ in rollout]
        for rollout in findings
    ]


# One rollout
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rollout", "finding"),
    [
        ({KL: 0.0999}, []),
        ({KL: 0.1}, [KL]),
        ({KL: 0.12, KL_ERROR: 0.0101}, []),  # 0.12 - 2 * 0.0101 < 0.1
        ({KL: 0.12, KL_ERROR: 0.0099}, [KL]),
        # A mean of 0.9 from tokens that differ by nothing: ESS is 1, and the error (1 - 0.9) /
        # sqrt(tokens).
        ({RATIO: 0.9, TOKENS: 65}, [RATIO]),  # 0.1 - 4 * 0.1 / sqrt(65) > 0.05
        ({RATIO: 0.9, TOKENS: 63}, []),
        ({RATIO: 1.1, TOKENS: 65}, [RATIO]),
        ({RATIO: 0.951, TOKENS: 1e9}, []),
        # mean(rho^2) = 0.81 / 0.9 = 0.9, so the error is sqrt((0.9 - 1.8 + 1) / tokens) = 0.316 /
        # sqrt(tokens).
        ({RATIO: 0.9, ESS: 0.9, TOKENS: 630}, []),
        ({RATIO: 0.9, ESS: 0.9, TOKENS: 650}, [RATIO]),
        # 5 tokens, less 2 * sqrt(5), are 0.528: 0.0021
        ({CONTRADICTED: 0.02, TOKENS: 250}, [CONTRADICTED]),
        ({CONTRADICTED: 0.02, TOKENS: 240}, []),
    ],
)
def test_the_first_rollout_is_judged(rollout, finding):
    assert observed(new_guard(), rollout) == [finding]


@pytest.mark.parametrize(
    ("settings", "rollouts", "findings"),
    [
        # 0.0146 < 3 * 0.0049; at least 0.005
        ({}, [{KL: 0.0004}, {KL: 0.0049}, {KL: 0.002}, {KL: 0.0146}], [[]] * 4),
        ({}, [{KL: 0.0001}, {KL: 0.005}], [[], [KL]]),
        ({}, [{KL: 0.0049}, {KL: 0.0148}], [[], [KL]]),
        ({}, [{KL: 0.0049}, {KL: 0.038, KL_ERROR: 0.006}], [[], []]),
        ({}, [{KL: 0.09}, {KL: 0.1}], [[], [KL]]),  # the setting is a limit too
        # A rollout with a finding is not compared with.
        ({}, [{}, {KL: 0.05}, *[{}] * WINDOW, {KL: 0.05}], [[], [KL], *[[]] * WINDOW, [KL]]),
        # The first is sampled with the weights that score it, all others with weights that are one
        # rollout old.
        (
            {"rollouts_ahead": 1, "vllm_mode": "server"},
            [{KL: 0.0002}, {KL: 0.09}, {KL: 0.1}],
            [[], [], [KL]],
        ),
    ],
    ids=[
        "small",
        "from little",
        "three times",
        "within the error",
        "setting",
        "after a finding",
        "ahead",
    ],
)
def test_a_jump_is_three_times_the_largest_so_far(settings, rollouts, findings):
    assert observed(new_guard(**settings), *rollouts) == findings


def test_healthy_rollouts_of_few_tokens_raise_no_alarm():
    """log rho is normal with the mean -s^2/2, so the mean of rho is 1."""
    torch.manual_seed(0)
    tally = MismatchTally(Accelerator(cpu=True))
    for tokens in (1, 2, 4, 16, 64):
        guard = new_guard()
        for _ in range(500):
            spread = 0.02 if torch.rand(()) < 0.9 else 0.2  # most rollouts agree, some do not
            log_ratio = torch.randn(1, tokens) * spread - spread**2 / 2
            if torch.rand(()) < 0.1:
                log_ratio[0, 0] = -3.0  # a near tie
            tally.add(
                log_ratio - 0.5,
                torch.full((1, tokens), -0.5),
                torch.ones(1, tokens, dtype=torch.bool),
                2.0,
            )
            assert not guard.judge(tally.pop()), f"{tokens} tokens"


def test_contradicted_tokens_are_found_among_thousands():
    torch.manual_seed(0)
    tally, behavior = MismatchTally(Accelerator(cpu=True)), torch.full((8, 512), -0.5)
    proximal = behavior + 0.02 * torch.randn(8, 512)
    proximal[:, :8] = -3.0  # 64 of 4096, 2.5 nats below
    tally.add(proximal, behavior, torch.ones(8, 512, dtype=torch.bool), 2.0)
    metrics = tally.pop()
    assert metrics[CONTRADICTED] == 64 / 4096 and metrics[TOKENS] == 4096
    assert [text.split()[0] for text, _ in new_guard().judge(metrics)] == [CONTRADICTED]


@pytest.mark.parametrize(
    ("settings", "rollouts", "advice"),
    [
        ({}, [{RATIO: 0.1, KL: 1.0}], "SAMPLING"),
        ({}, [{KL: 0.2, CONTRADICTED: 0.1}], "FUNCTION"),  # from the first rollout on
        ({}, [{CONTRADICTED: 0.1}], "FUNCTION"),
        ({}, [{}, {KL: 0.2}], "STALE"),
        ({}, [{}, {CONTRADICTED: 0.1}], "STALE"),
        ({}, [{KL: 0.09}, {KL: 0.11}], "ROUNDING"),
        ({}, [{TAIL: 0.1}] * WINDOW, "ROUNDING"),
        ({"rollout_quantization": None}, [{TAIL: 0.1}] * WINDOW, "FUNCTION"),
    ],
)
def test_advice_depends_on_the_pattern(settings, rollouts, advice):
    guard = new_guard(**settings)
    first = next(findings for rollout in rollouts if (findings := guard.judge(QUIET | rollout)))
    assert first[0][1] == getattr(module, advice)


def test_an_evaluation_is_judged_without_changing_medians():
    guard = new_guard()
    assert not any(guard.judge(QUIET | {TAIL: 0.1}, training=False) for _ in range(2 * WINDOW))
    assert observed(guard, *[{TAIL: 0.1}] * WINDOW) == [*[[]] * (WINDOW - 1), [TAIL]]
    guard = new_guard()
    guard.judge(QUIET, training=False)
    assert guard.judge(QUIET | {KL: 0.05}, training=False)[0][1] == module.STALE
    for _ in range(2 * WINDOW):
        guard.judge(QUIET, training=False)
    assert guard.alarm, "it ends with rollouts of training"


# Drift
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("metric", "below", "beyond"), [(TAIL, 0.0099, 0.01), (ESS, 0.8501, 0.85)])
def test_the_median_of_five_rollouts_decides(metric, below, beyond):
    guard = new_guard()
    # Two beyond and two below leave the median of five to the fifth; with three of five beyond, it
    # is beyond.
    assert (
        observed(guard, *[{metric: value} for value in (beyond, beyond, below, below)]) == [[]] * 4
    )
    assert observed(guard, {metric: below}, {metric: beyond}, {metric: beyond}) == [[], [], []]
    # of below, below, beyond, beyond, beyond
    assert observed(guard, {metric: beyond}) == [[metric]]
    assert guard.alarm


def test_a_finding_has_the_median_and_the_threshold():
    guard = new_guard()
    # Sorted ESS: nan counts as the worst, so the median of nan .2 .4 .5 .9 is .4.
    for ess in (0.9, 0.5, math.nan, 0.4):
        assert guard.judge(QUIET | {ESS: ess}) == []
    assert guard.judge(QUIET | {ESS: 0.2}) == [
        (f"the median of {ESS} is 0.4 (threshold 0.85)", module.ROUNDING)
    ]


@pytest.mark.parametrize("outlier", [math.inf, math.nan])
def test_outliers_raise_no_alarm(outlier):
    guard = new_guard()
    bad = {KL: outlier, KL_ERROR: outlier, TAIL: outlier, ESS: outlier, RATIO: math.nan}
    assert not any(observed(guard, *[{}, bad, {}, {}, bad] * 10)) and not guard.alarm
    assert observed(guard, bad) == [[TAIL, ESS]]  # the third of five
    assert observed(new_guard(), {}, bad, {KL: 0.006}) == [[], [], [KL]], (
        "jumps are not measured from them"
    )


def test_the_alarm_ends_after_five_rollouts_without_a_finding():
    guard = new_guard()
    assert observed(guard, {}, {KL: 0.2}) == [[], [KL]]
    # A second finding adds no warning, and the count begins again.
    assert observed(guard, *[{}] * (WINDOW - 1), {RATIO: 0.5}, *[{}] * (WINDOW - 1)) == [[]] * (
        2 * WINDOW - 1
    )
    assert guard.alarm
    assert observed(guard, {}) == [[]] and not guard.alarm
    assert observed(guard, {KL: 0.2}) == [[KL]]


@pytest.mark.parametrize(
    ("cap", "is_tail"), [(1.2, False), (1.999, False), (2.0, True), (10.0, True), (None, True)]
)
def test_tail_is_not_judged_with_a_cap_below_2(cap, is_tail):
    assert observed(new_guard(cap=cap), *[{TAIL: 0.06}] * WINDOW)[-1] == ([TAIL] if is_tail else [])


def test_a_rollout_without_tokens_changes_nothing():
    guard = new_guard()
    observed(guard, *[{TAIL: 1.0}] * (WINDOW - 1))
    assert guard.judge({}) == guard.judge({"mismatch/invalid_share": 0.0}) == [] and not guard.alarm
    assert observed(guard, {TAIL: 1.0}) == [[TAIL]]
    assert guard.judge({}) == [] and guard.alarm


# Contradictions
# --------------------------------------------------------------------------------------------------


def proven(guard: MismatchGuard, *rollouts: dict[str, float], **settings) -> list[bool]:
    """By rollout, whether it shows that the engine computes the policy's function."""
    results = []
    for rollout in rollouts:
        row = QUIET | rollout
        results.append(guard.prove(row, **{"training": True, "asks_again": False} | settings))
        guard.observe(row)
    return results


@pytest.mark.parametrize(
    ("before", "fault", "limit"),
    [
        # before there is a history
        ([], {KL: 0.52, KL_ERROR: 0.0099}, "at most 0.5 would do"),
        # five times the largest so far, and at least 0.005
        ([{KL: 0.02}, {KL: 0.01}], {KL: 0.12, KL_ERROR: 0.0099}, "at most 0.1 would do"),
        ([{KL: 0.0001}], {KL: 0.0251}, "at most 0.025 would do"),
        # a format that rounds much is measured by itself
        ([{KL: 0.08}, {KL: 0.3}], {KL: 0.81}, "at most 0.8 would do"),
        ([], {CONTRADICTED: 0.02, TOKENS: 1000}, "2.0% of the tokens unlikely"),
    ],
)
def test_what_neither_rounding_nor_an_update_explains_is_an_error(before, fault, limit):
    guard = new_guard()
    proven(guard, *before)
    with pytest.raises(SyncError, match=limit):
        proven(guard, fault)


@pytest.mark.parametrize(
    ("before", "rollout"),
    [
        ([], {KL: 0.49}),
        ([], {KL: 0.52, KL_ERROR: 0.0101}),
        ([{KL: 0.02}], {KL: 0.12, KL_ERROR: 0.0101}),
        ([{KL: 0.02}], {KL: 0.06, CONTRADICTED: 0.02, TOKENS: 900}),
        ([{KL: 0.02}], {KL: math.nan, KL_ERROR: math.nan}),
    ],
)
def test_what_may_be_noise_is_none(before, rollout):
    assert proven(new_guard(), *before, rollout)[-1] is True


def test_a_fault_does_not_become_what_is_usual():
    guard = new_guard()
    proven(guard, {KL: 0.02})
    guard.observe(QUIET | {KL: 0.5})  # where no proof was due
    with pytest.raises(SyncError):
        proven(guard, {KL: 0.5})


@pytest.mark.parametrize(
    ("formats", "limit"),
    [("w4a16", 3.0), ({"re:.*down_proj": "w4a16", "*": "int8"}, 3.0), ("fp8", 0.5), (None, 0.1)],
)
def test_a_first_rollout_is_measured_by_its_format(formats, limit):
    proven(new_guard(rollout_quantization=formats), {KL: limit - 0.01})
    with pytest.raises(SyncError, match=f"at most {limit:.2g} would do"):
        proven(new_guard(rollout_quantization=formats), {KL: limit + 0.01})


def test_a_cache_of_eight_bits_rounds_as_well():
    cache = {"kv_cache_dtype": "fp8"}
    guard = new_guard(rollout_quantization=None, vllm_engine_kwargs=cache)
    assert proven(guard, {KL: 0.49}) == [True]


def test_a_low_temperature_sharpens_the_noise_of_rounding():
    assert proven(new_guard(temperature=0.1), {KL: 4.9, CONTRADICTED: 0.2}) == [True]
    with pytest.raises(SyncError, match="at most 5 would do"):
        proven(new_guard(temperature=0.1), {KL: 5.1})
    with pytest.raises(SyncError, match="at most 0.5 would do"):
        proven(new_guard(temperature=2.0), {KL: 0.51})
    with pytest.raises(SyncError, match="unlikely"):
        proven(new_guard(temperature=1.0), {CONTRADICTED: 0.2})


def test_a_difference_that_grows_step_by_step_does_not_become_usual():
    """As that of an engine that keeps its first weights does."""
    rows = [{KL: 0.02 * 1.2**step} for step in range(13)]  # up to 0.18
    assert all(proven(new_guard(), *rows))
    with pytest.raises(SyncError, match="at most 0.2 would do"):
        proven(new_guard(), *rows, {KL: 0.21})
    small = [{KL: 0.001}, {KL: 0.024}, {KL: 0.099}]
    with pytest.raises(SyncError, match="at most 0.1 would do"):  # which INT8 has in healthy runs
        proven(new_guard(), *small, {KL: 0.11})


def test_a_first_rollout_is_not_blamed_on_an_update():
    with pytest.raises(SyncError) as first:
        proven(new_guard(), {KL: 1.0})
    with pytest.raises(SyncError) as later:
        proven(new_guard(), {KL: 0.02}, {KL: 1.0})
    assert "learning_rate" in str(later.value) and "learning_rate" not in str(first.value)


def test_a_contradiction_between_two_proofs_asks_for_one():
    guard = new_guard()
    assert guard.is_contradicted(QUIET | {KL: 0.6}, training=True)
    assert not guard.is_contradicted(QUIET, training=True)
    assert not guard.is_contradicted({}, training=True)
    assert not new_guard(top_k=1).is_contradicted(QUIET | {KL: 0.6}, training=True)


def test_tokens_of_a_cut_distribution_show_nothing():
    guard = new_guard(top_k=1)
    assert proven(guard, {KL: 3.0, CONTRADICTED: 0.9, RATIO: 0.1}) == [True]
    with pytest.raises(SyncError):
        proven(new_guard(temperature=0.5), {KL: 3.0})


def test_a_gpu_is_asked_again():
    guard = new_guard()
    fault = {KL: 0.7}
    assert proven(guard, fault, {}, fault, asks_again=True) == [False, True, False]
    with pytest.raises(SyncError):
        proven(guard, fault, asks_again=True)


def test_an_evaluation_may_be_farther_away():
    guard = new_guard()
    proven(guard, {KL: 0.02})
    assert proven(guard, {KL: 0.19}, training=False) == [True]
    with pytest.raises(SyncError):
        proven(guard, {KL: 0.5}, training=False)


def test_without_tokens_nothing_is_shown():
    assert not new_guard().prove({}, training=True, asks_again=False)
    assert not new_guard().prove({"mismatch/invalid_share": 0.0}, training=True, asks_again=False)


def test_a_rollout_ahead_is_compared_with_others_of_its_age():
    guard = new_guard(rollouts_ahead=1, vllm_mode="server")
    assert proven(guard, {KL: 0.0001}, {KL: 0.03}, {KL: 0.09}) == [True, True, True]
    assert proven(guard, {KL: 0.8}) == [True]
    fresh = new_guard(rollouts_ahead=1, vllm_mode="server")
    proven(fresh, {KL: 0.0001}, {KL: 0.03}, {KL: 0.09})
    with pytest.raises(SyncError, match="at most 0.9"):
        proven(fresh, {KL: 1.0})


# Settings
# --------------------------------------------------------------------------------------------------


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
    for config in (QuRLGRPOConfig, QuRLRLOOConfig):
        with pytest.raises(ValueError, match=message):
            config("out", **SETTINGS | settings)


# Warnings and stops
# --------------------------------------------------------------------------------------------------


def test_one_warning_per_alarm_says_what_to_do(caplog):
    guard = new_guard(kl=0.05)
    kls = [0.04, *[0.06] * 2, *[0.01] * WINDOW, 0.07]
    with caplog.at_level("WARNING"):
        logged = [guard.observe(QUIET | {KL: kl})["mismatch/guard"] for kl in kls]
    assert logged == [0, 1, 1, 1, 1, 1, 1, 0, 1]
    first, second = (
        record.getMessage() for record in caplog.records if record.name == "trl_qurl.trainers.guard"
    )
    for part in (
        "mismatch/kl_k3 is 0.06 (threshold 0.05)",
        "objective='tis'",
        "--kl 5e-3",
        "mismatch_guard='stop'",
    ):
        assert part in first
    assert "mismatch/kl_k3 is 0.07" in second
    control = TrainerControl()
    guard.on_step_end(None, TrainerState(), control)
    assert not control.should_training_stop and not control.should_save


@pytest.mark.parametrize("ahead", [0, 1])
def test_advice_names_old_weights_only_with_rollouts_ahead(ahead, caplog):
    guard = new_guard(rollouts_ahead=ahead, vllm_mode="server")
    for kl in (0.09, 0.11):
        guard.observe(QUIET | {KL: kl})
    assert ("set rollouts_ahead=0" in caplog.text) == bool(ahead)


def test_a_stop_saves_without_an_evaluation():
    guard, control = new_guard(mismatch_guard="stop"), TrainerControl(should_evaluate=True)
    for kl, stops in ((0.0, False), (1.0, True)):
        guard.observe(QUIET | {KL: kl})
        guard.on_step_end(QuRLGRPOConfig("out", **SETTINGS), TrainerState(), control)
        assert control.should_training_stop == control.should_save == stops
    assert not control.should_evaluate


# Training
# --------------------------------------------------------------------------------------------------

STOP = {"mismatch_guard": "stop", "mismatch_guard_kl": 1e-9, "max_steps": 20, "beta": 0.0}


@pytest.mark.vllm
@pytest.mark.xdist_group("guard")
@needs_avx512
def test_a_stop_leaves_a_checkpoint_that_resumes_in_16_bits(train, tmp_path):
    # Two updates per rollout: the first rollout is that of steps 1 and 2.
    checkpoint = tmp_path / "stop" / "checkpoint-1"
    unquantized = {"rollout_quantization": None, "mismatch_guard_kl": 0.1, "max_steps": 4}
    stopped, resumed = train(
        [
            tmp_path / "stop",
            "--config",
            json.dumps(STOP | {"rollout_quantization": "w4a16"}),
            "--rloo",
        ],
        [
            tmp_path / "resumed",
            "--config",
            json.dumps(STOP | unquantized),
            "--rloo",
            "--resume",
            checkpoint,
        ],
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


PLANTED = {
    "a sync is skipped": (KL, module.STALE),
    "other weights from the start": (KL, module.FUNCTION),
    "structured outputs": (RATIO, module.SAMPLING),
}


@pytest.mark.vllm
@pytest.mark.xdist_group("guard")
@needs_avx512
@pytest.mark.parametrize("kind", ["GRPO", pytest.param("RLOO", marks=pytest.mark.slow)])
def test_planted_faults_are_found_and_told_apart(run_scenario, tmp_path, kind):
    record = run_scenario("planted.py", tmp_path, kind)
    assert record["training"]["guard"] == [0, 0, 0]
    assert not any(
        record[healthy]["warnings"] for healthy in ("training", "evaluation", "synced again")
    )
    for fault, (metric, advice) in PLANTED.items():
        [warning] = record[fault]["warnings"]
        assert metric in warning and advice in warning, fault
        assert record[fault]["mismatch/guard"] == 1


# Stored runs
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def groups():
    return guard_benchmark.replay_all(guard_benchmark.RESULTS, guard_benchmark.REAL_RESULTS)


def test_no_healthy_run_of_the_study_raises_an_alarm(groups):
    healthy = [group for group in groups if group.expected == guard_benchmark.HEALTHY]
    assert sum(len(group.first_alarms) for group in healthy) >= 213
    assert not {f"{group.experiment}/{group.arm}" for group in healthy if any(group.first_alarms)}
    # The distance from each threshold is at least a tenth of it.
    assert max(group.farthest[KL] for group in healthy) < 0.06
    assert max(group.farthest[TAIL] for group in healthy) < 0.009
    assert min(group.farthest[ESS] for group in healthy) > 0.865


@pytest.mark.parametrize(
    ("kind", "least"), [(guard_benchmark.COLLAPSING, 5), (guard_benchmark.HARMED, 120)]
)
def test_all_harmed_runs_of_the_study_raise_an_alarm(kind, least, groups):
    first = [alarm for group in groups if group.expected == kind for alarm in group.first_alarms]
    assert len(first) >= least and None not in first


def test_a_healthy_run_with_an_alarm_is_an_error(tmp_path, capsys):
    rows = [{"step": 4 * i, KL: 0.05 * i, TAIL: 0.0, ESS: 0.99} for i in range(1, 8)]
    settings = {"seed": 0, "rollout_quantization": "int8", "vllm_importance_sampling_clip_max": 2.0}
    (tmp_path / "real").mkdir()
    for arm, status in (("int3_tis", 0), ("int8_tis", 1)):
        write_short_log(settings, rows, tmp_path / "main" / f"{arm}-seed0.jsonl.gz")
        paths = [
            "--runs",
            str(tmp_path),
            "--real-runs",
            str(tmp_path / "real"),
            "-o",
            str(tmp_path / "out.json"),
        ]
        assert guard_benchmark.main(paths) == status
    printed = capsys.readouterr().out
    assert "An alarm in a healthy run: main/int8_tis" in printed and "main/int3_tis" not in printed
    [int3, int8] = json.loads((tmp_path / "out.json").read_text())["results"]
    assert int3["first_alarms"] == int8["first_alarms"] == [2] and int8["farthest"][
        KL
    ] == pytest.approx(0.35)
