"""`trl-qurl bench`: arithmetic against brute force, errors before slow work, and one real run."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from conftest import child_environment
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import ENGINE, tiny_model

from trl_qurl.lab.bench.costs import EngineCosts, Range, Timing, TrainingCosts, at_size, per_token
from trl_qurl.lab.bench.prediction import WORTHWHILE, break_even, compare, predict_step
from trl_qurl.lab.bench.run import bench, run_job, save_config
from trl_qurl.lab.bench.table import advice, shown, size
from trl_qurl.lab.bench.workload import Job, Workload
from trl_qurl.quantization import SCHEMES

WORKLOAD = Workload(prompt_len=100, completion_len=200, batch=32, generations=8, train_batch=4, updates=2)


def timing(size, *seconds):
    return Timing(size, list(seconds))


def engine(prompts=1.0, rate=0.1, sync=2.0, lengths=(1, 8, 200), spread=0.0, weights=100):
    """An engine of constant cost per token."""

    def times(seconds):
        return [seconds * (1 - spread), seconds, seconds * (1 + spread)]

    generation = [Timing(length, times(prompts + rate * (length - 1))) for length in lengths]
    return EngineCosts(generation, Timing(1, times(sync)), weights, 10.0)


TRAINING = TrainingCosts([timing(300, 0.3)], [timing(300, 1.5)], timing(1, 0.7))


# Costs ---------------------------------------------------------------------------------------------------------------


def test_ranges_add_and_scale():
    assert Range(1, 2, 3) + Range(10, 20, 30) == (11, 22, 33)
    assert Range(1, 2, 3).times(2) == (2, 4, 6)
    assert timing(5, 3.0, 1.0, 2.0).range == (1.0, 2.0, 3.0)


@given(st.integers(1, 5000), st.floats(0.01, 10), st.floats(0.001, 1))
def test_a_constant_cost_per_token_is_found_at_any_length(tokens, prompts, rate):
    estimate = engine(prompts, rate).generate(tokens)
    assert estimate.middle == pytest.approx(prompts + rate * (tokens - 1))
    assert estimate.low == pytest.approx(estimate.middle)
    assert estimate.high == pytest.approx(estimate.middle)


@given(st.floats(0.001, 0.1), st.floats(0, 1e-3), st.integers(100, 2000))
def test_a_cost_that_grows_with_the_context_is_bracketed(rate, growth, tokens):
    """T(L) = 1 + (L - 1)(r + g L / 2), beyond the lengths measured."""

    def true(length):
        return 1 + (length - 1) * (rate + growth * length / 2)

    costs = EngineCosts([timing(n, true(n)) for n in (1, 32, 100)], timing(1, 1.0), 0, 0.0)
    estimate = costs.generate(tokens)
    assert estimate.low <= true(tokens) * 1.001
    assert estimate.high >= true(tokens) * 0.999
    assert estimate.middle == pytest.approx(true(tokens), rel=0.02)


def test_one_length_alone_says_what_one_token_costs():
    costs = EngineCosts([timing(1, 2.0)], timing(1, 1.0), 0, 0.0)
    assert costs.generate(1).middle == costs.generate(50).middle == 2.0


def test_throughput_counts_the_prompts():
    assert engine(prompts=1.0, rate=0.1).tokens_per_second(11, batch=4) == pytest.approx(44 / 2.0)


def test_noise_never_makes_a_token_cost_less_than_nothing():
    assert per_token(timing(1, 5.0), timing(8, 4.0)) == (0, 0, 0)


def test_passes_between_and_beyond_the_sizes_measured():
    timings = [timing(100, 2.0), timing(200, 3.0)]  # 1 + 0.01 per token
    assert at_size(timings, 1000).middle == pytest.approx(11.0)
    assert at_size(timings, 100).middle == pytest.approx(1.5), "a pass is not split below what was measured"
    assert at_size(timings[:1], 1000).middle == pytest.approx(20.0)


# Prediction ----------------------------------------------------------------------------------------------------------


def test_a_step_is_the_sum_of_its_parts():
    step = predict_step(engine(), TRAINING, WORKLOAD)
    passes = 32 // 4
    assert step.sync.middle == 2.0
    assert step.generate.middle == pytest.approx(1 + 0.1 * 199)
    assert step.score.middle == pytest.approx(passes * 0.3 * 4)  # 1,200 tokens in a pass, 300 measured
    assert step.update.middle == pytest.approx(passes * 1.5 * 4 + 2 * 0.7)
    parts = [step.sync, step.generate, step.score, step.update]
    assert step.total.middle == pytest.approx(sum(part.middle for part in parts))
    assert step.rollout_share == pytest.approx((20.9 + 2.0) / step.total.middle)


def test_one_update_per_rollout_scores_nothing_beforehand():
    step = predict_step(engine(), TRAINING, replace(WORKLOAD, updates=1))
    assert step.score == Range(0.0, 0.0, 0.0)
    assert step.update.middle == pytest.approx(8 * 1.5 * 4 + 0.7)


def test_the_speedup_is_that_of_the_whole_step():
    found = compare(engine(weights=100), engine(rate=0.05, sync=3.0, weights=60), TRAINING, WORKLOAD)
    rest = 8 * 0.3 * 4 + 8 * 1.5 * 4 + 2 * 0.7
    assert found.speedup.middle == pytest.approx((2 + 20.9 + rest) / (3 + 10.95 + rest))
    assert found.rollout_speedup == pytest.approx(20.9 / 10.95)
    assert found.bytes_saved == 40


def test_the_range_of_the_speedup_has_every_combination_in_it():
    before, after = engine(spread=0.2), engine(rate=0.05, spread=0.1)
    found = compare(before, after, TRAINING, WORKLOAD).speedup
    one, other = predict_step(before, TRAINING, WORKLOAD), predict_step(after, TRAINING, WORKLOAD)
    rest = one.score.middle + one.update.middle
    ratios = [
        (sync + generate + rest) / (other_sync + other_generate + rest)
        for sync in one.sync
        for generate in one.generate
        for other_sync in other.sync
        for other_generate in other.generate
    ]
    assert found.low == pytest.approx(min(ratios))
    assert found.high == pytest.approx(max(ratios))


@settings(deadline=None)
@given(st.floats(0.01, 0.2), st.floats(0.01, 0.2), st.floats(0, 20))
def test_the_break_even_is_the_first_length_that_saves(rate, quantized_rate, extra):
    before, after = engine(rate=rate, sync=1.0), engine(rate=quantized_rate, sync=1.0 + extra)
    saving = [
        before.generate(n).middle - after.generate(n).middle > after.sync.range.middle - before.sync.range.middle
        for n in range(1, 16 * 100 + 1)
    ]
    found = break_even(before, after, longest=100)
    if saving[0] and saving[-1]:
        assert found == 1
    elif not saving[-1]:
        assert found is None
    else:
        assert found == saving.index(True) + 1


@pytest.mark.parametrize(
    ("rate", "spread", "said"), [(0.01, 0.01, "yes"), (0.1, 0.01, "no"), (0.15, 0.01, "no"), (0.05, 0.3, "unclear")]
)
def test_advice(rate, spread, said):
    light = TrainingCosts([timing(1200, 0.01)], [timing(1200, 0.05)], timing(1, 0.01))
    found = compare(engine(spread=spread), engine(rate=rate, spread=spread), light, WORKLOAD)
    assert found.advice == said
    sentence = advice(found)
    assert sentence.startswith({"yes": "Yes.", "no": "Don't", "unclear": "Unclear"}[said])
    assert f"{found.speedup.middle:.2f} ({found.speedup.low:.2f}-{found.speedup.high:.2f})" in sentence
    assert (found.speedup.low >= WORTHWHILE) == (said == "yes")


@pytest.mark.parametrize(
    ("value", "text"), [(0.00123, "0.001"), (0.5, "0.5"), (12.345, "12.3"), (99.96, "100"), (1234.5, "1234")]
)
def test_seconds(value, text):
    assert shown(value) == text


def test_sizes():
    assert [size(count) for count in (1_500_000, 2_345_000_000)] == ["1.5 MB", "2.35 GB"]


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch": 0}, "batch is 0: give a positive number"),
        ({"batch": 60}, r"60 completions cannot hold groups of 8: .* multiple of --generations"),
        ({"train_batch": 6}, r"split into 4 updates from passes of 6: make it a multiple of 24"),
    ],
)
def test_a_workload_that_does_not_fit(given, message):
    with pytest.raises(ValueError, match=message):
        Workload(**given)


def test_a_format_that_there_is_not():
    with pytest.raises(
        ValueError, match="Unknown quantization scheme 'int3'; did you mean 'int8'\\? Choose one of 'int8', 'fp8'"
    ):
        bench("model", Workload(), schemes=["int3"])


def test_a_context_that_is_too_short(tmp_path):
    tiny_model().config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"256 and completions of 512 .* context of 128: shorten"):
        save_config(str(tmp_path), Workload(), [SCHEMES["int8"]], (), str(tmp_path / "copy"))


def test_nothing_left_to_quantize(tmp_path):
    tiny_model().config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="nothing to quantize"):
        save_config(str(tmp_path), Workload(16, 16), [SCHEMES["int8"]], ("re:.*",), str(tmp_path / "copy"))


def test_a_process_that_fails_says_what_it_said(warm_python, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(sys, "executable", str(warm_python))
    with pytest.raises(ChildProcessError, match="INT8 rollouts failed"):
        run_job(Job(str(tmp_path / "nowhere"), "int8", Workload(), 1.0), tmp_path)
    assert "nowhere" in capfd.readouterr().err


# The command ---------------------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.xdist_group("bench")
def test_the_command(warm_python, tmp_path):
    tiny_model().config.save_pretrained(tmp_path / "model")
    command = [warm_python, "-m", "trl_qurl", "bench", tmp_path / "model", "--quick", "-o", tmp_path / "bench.json"]
    command += [
        "--schemes",
        "int8",
        "--prompt-len",
        "16",
        "--completion-len",
        "40",
        "--batch",
        "16",
        "--train-batch",
        "4",
    ]
    command += ["--engine-kwargs", json.dumps(ENGINE)]
    done = subprocess.run(
        list(map(str, command)),
        env=child_environment(COLUMNS="80"),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "one step of 16 completions, 40 tokens each" in " ".join(done.stdout.split())
    assert "…" not in done.stdout, "a column does not fit into 80 characters"
    record = json.loads((tmp_path / "bench.json").read_text())
    assert set(record["measurements"]) == {"none", "int8"}
    for measurement in record["measurements"].values():
        lengths = [timing["size"] for timing in measurement["engine"]["generation"]]
        assert lengths == [1, 8, 40], "a tiny model's completions are short enough to be measured whole"
    bf16, int8 = (record["measurements"][name]["engine"]["weight_bytes"] for name in ("none", "int8"))
    held = sum(p.numel() for n, p in tiny_model().named_parameters() if "proj" in n and "bias" not in n)
    channels = sum(p.shape[0] for n, p in tiny_model().named_parameters() if "proj" in n and "bias" not in n)
    assert bf16 - int8 == held - 4 * channels  # one byte less per weight, a float32 scale per channel
    comparison = record["comparisons"]["int8"]
    low, middle, high = comparison["speedup"]
    assert 0 < low <= middle <= high
    assert comparison["advice"] in ("yes", "no", "unclear")
    assert "INT8: " in done.stdout
