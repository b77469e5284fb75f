"""The mismatch guard: when the alarm goes on and off, and what training does then."""

import json
import math

import pytest
from test_config import config
from test_engine import ADAPTER, SAME_BF16, assert_synced

from trl_qurl import QuRLRLOOConfig
from trl_qurl.rollout.guard import ESS, KL, TAIL, WINDOW, MismatchGuard

QUIET = {KL: 0.001, TAIL: 0.0, ESS: 0.999}


def observed(guard: MismatchGuard, *rollouts: dict[str, float]) -> list[list[str]]:
    """The metrics that each rollout finds beyond their thresholds."""
    return [[finding.metric for finding in guard.observe(QUIET | rollout)] for rollout in rollouts]


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
    kl, ess = guard.observe({KL: 0.02, ESS: 0.2, TAIL: 0.0})
    assert (kl.metric, kl.threshold, kl.median) == (KL, 0.02, pytest.approx(0.05))
    assert (ess.metric, ess.threshold, ess.median) == (ESS, 0.85, pytest.approx(0.4))


@pytest.mark.parametrize("outlier", [1e6, math.inf, math.nan])
def test_outliers_raise_no_alarm(outlier):
    guard = MismatchGuard()
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
    guard = MismatchGuard(cap=cap)
    assert observed(guard, *[{TAIL: 0.06}] * WINDOW)[-1] == ([TAIL] if is_tail else [])


def test_a_rollout_without_tokens_changes_nothing():
    guard = MismatchGuard()
    observed(guard, *[{KL: 1.0}] * (WINDOW - 1))
    assert guard.observe({}) == [] and not guard.alarm
    assert observed(guard, {KL: 1.0}) == [[KL]]
    assert guard.observe({}) == [] and guard.alarm


@pytest.mark.parametrize("seen", range(8))
def test_a_restored_guard_goes_on_where_it_was(seen):
    rollouts = [{KL: kl} for kl in (1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0)]
    whole, first, second = MismatchGuard(), MismatchGuard(), MismatchGuard()
    expected = observed(whole, *rollouts)
    assert expected[4] == [KL] and sum(map(len, expected)) == 2
    observed(first, *rollouts[:seen])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert observed(second, *rollouts[seen:]) == expected[seen:]


# Settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mismatch_guard": "fall back"}, "'off', 'warn', 'stop', 'fallback'; did you mean 'fallback'"),
        ({"mismatch_guard_kl": 0.0}, "mismatch_guard_kl is 0.0, but must be positive and finite"),
        ({"mismatch_guard_kl": math.inf}, "mismatch_guard_kl is inf"),
        ({"mismatch_guard_kl": math.nan}, "mismatch_guard_kl is nan"),
        ({"mismatch_guard": "fallback", "vllm_mode": "server"}, "mismatch_guard='stop'.*serve MODEL --scheme none"),
        ({"mismatch_guard": "fallback", "rollout_quantization": None}, "in 16 bits: .* no mismatch.*'warn' or 'stop'"),
        ({"mismatch_guard": "fallback", "training_forward": "quantized"}, "training_forward='quantized'.*'warn'"),
        ({"mismatch_guard": "fallback", "round_base": True}, "round_base=True.*'warn' or 'stop'"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)
    if settings.get("mismatch_guard") == "fallback":
        assert config(**settings | {"mismatch_guard": "stop"}).mismatch_guard == "stop"


def test_rloo_has_the_guard():
    assert QuRLRLOOConfig("out", use_cpu=True, bf16=False).mismatch_guard == "warn"


# Training ------------------------------------------------------------------------------------------------------------

# Two updates per rollout: the fifth rollout is that of steps 9 and 10.
FALLBACK = {
    "rollout_quantization": "w4a16",
    "mismatch_guard": "fallback",
    "mismatch_guard_kl": 2e-5,
    "max_steps": 14,
    "sync_check_interval": 1,
}
SAVING = {"save_strategy": "steps", "save_steps": 12}
STOP = {"mismatch_guard": "stop", "mismatch_guard_kl": 1e-9, "max_steps": 20, "beta": 0.0}


@pytest.fixture(scope="module")
def runs(train, run_scenario, tmp_path_factory):
    out = tmp_path_factory.mktemp("guard")
    cases = {
        "fallback": (FALLBACK | SAVING, ["--export", out / "full"]),
        "adapter": (FALLBACK | ADAPTER | {"max_steps": 10}, ["--lora", "--export", out / "adapter"]),
        "resumed": (FALLBACK | {"save_strategy": "no"}, ["--resume", out / "fallback-run" / "checkpoint-12"]),
        "stop": (STOP, ["--rloo"]),
        "stop again": (STOP, ["--rloo", "--resume", out / "stop-run" / "checkpoint-9"]),
        "other settings": (
            STOP | {"mismatch_guard_kl": 10.0, "max_steps": 10},
            ["--rloo", "--resume", out / "stop-run" / "checkpoint-9"],
        ),
    }
    records = train(*([out / f"{name}-run", "--config", json.dumps(s), *more] for name, (s, more) in cases.items()))
    fresh = run_scenario("fresh_engine.py", out / "full", out / "adapter")
    return out, dict(zip(cases, records, strict=True)), fresh


def rollouts(record, metric):
    return [row[metric] for row in record["history"] if "reward" in row]


@pytest.mark.vllm
@pytest.mark.xdist_group("guard")
def test_a_fallback_starts_the_engine_again_in_16_bits(runs):
    _, records, fresh = runs
    record = records["fallback"]
    assert rollouts(record, "mismatch/guard") == [0, 0, 0, 0, 1, 2, 2]
    kl = rollouts(record, "mismatch/kl_k3")
    assert min(kl[:5]) > 2e-5 and max(kl[5:]) < 5e-6, kl
    assert record["started_again"], "the first engine is still there"
    assert_synced(record, fresh[0], tolerance=SAME_BF16)
    # What is measured and checked is no longer a quantized copy.
    print(record["history"])
