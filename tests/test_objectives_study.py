"""The comparison of objectives: what its harsher quantizers do, what it would run, and what its tables say."""

import copy
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import child_environment
from documents import rows
from peft import LoraConfig, get_peft_model

from benchmarks.objectives import contrasts, study, summary
from benchmarks.objectives.arms import EXPERIMENTS, RETIRED
from benchmarks.objectives.coarse import CODE_BITS, add_coarse_schemes, round_activations
from benchmarks.objectives.one_run import LORA, shortened, write_short_log
from benchmarks.objectives.recorder import BothPolicies
from trl_qurl.lab.demo import evaluate, task, warm_start
from trl_qurl.objective import OBJECTIVES
from trl_qurl.quantization.formats import SCHEMES, get_scheme
from trl_qurl.trainers.run_log import read_run

ROOT = Path(__file__).parents[1]


@pytest.fixture
def coarse(monkeypatch):
    added = dict(SCHEMES)  # so that other tests see no more than there are
    monkeypatch.setattr("trl_qurl.quantization.formats.SCHEMES", added)
    add_coarse_schemes()


@pytest.mark.parametrize(("name", "bits"), CODE_BITS.items())
def test_coarse_codes_have_so_many_bits(name, bits, coarse):
    weight = torch.randn(16, 400, generator=torch.Generator().manual_seed(0))
    scheme = get_scheme(name)
    rounded = scheme.quantize(weight)
    codes, scale = rounded["weight"], rounded["weight_scale"]
    assert codes.dtype == torch.int8 and len(codes.unique()) == 2**bits
    # The largest code stands for absmax less half a step, as with INT8; nothing is further off than that.
    half = 2 ** (bits - 1)
    torch.testing.assert_close(scale, weight.abs().amax(1, keepdim=True) / (half - 0.5))
    assert ((scheme.dequantize(rounded) - weight).abs() <= scale / 2 + 1e-6).all()
    # The engine's kernel is that of INT8: it rounds activations to eight bits whatever the weights have.
    assert torch.equal(scheme.quantize_activations(weight), SCHEMES["int8"].quantize_activations(weight))


def test_coarse_activations_have_so_many_levels():
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    rounded = round_activations(x, bits=4)
    step = x.abs().amax(-1, keepdim=True) / 7
    torch.testing.assert_close((rounded / step).round(), rounded / step, atol=1e-4, rtol=0)
    assert ((rounded - x).abs() <= step / 2 + 1e-6).all()
    assert all(len(row.unique()) <= 15 for row in rounded)
    assert torch.equal(round_activations(torch.zeros(2, 3), 4), torch.zeros(2, 3))


def test_every_experiment_can_be_told_apart_and_summed_up():
    for name, experiment in EXPERIMENTS.items():
        arms = {arm.name: arm for arm in experiment.arms}
        assert len(arms) == len(experiment.arms), f"{name} has two arms of one name"
        assert all(
            arm.changed["objective"] in (*OBJECTIVES, *RETIRED)
            for arm in experiment.arms
            if "objective" in arm.changed
        )
        others = {arm.name for arm in EXPERIMENTS[experiment.beside].arms} if experiment.beside else set()
        assert not others & arms.keys(), f"{name} has arms of {experiment.beside}"
        for pair in summary.CONTRASTS[name]:
            assert set(pair) <= arms.keys() | others, f"{name} compares {pair}, which it does not run"
    main = EXPERIMENTS["main"].arms
    assert {arm.scheme for arm in main} == {None, "int8", "int4", "int3"}
    assert all(len(arm.seeds) >= 5 for arm in main if arm.scheme in (None, "int8", "int3"))
    assert all(arm.lora for name in ("lora", "lora_rate") for arm in EXPERIMENTS[name].arms)
    searched = {seed for arm in EXPERIMENTS["lora_rate"].arms for seed in arm.seeds}
    assert not searched & {seed for arm in EXPERIMENTS["lora"].arms for seed in arm.seeds}


def test_only_what_is_missing_is_run(tmp_path):
    every = study.missing_runs(["main"], tmp_path, None, None)
    assert len(every) == (13 + 3) * 5 + 3 * 3
    assert not any(
        arm.changed["objective"] in RETIRED for arm, _, _ in study.missing_runs(["ahead"], tmp_path, None, None)
    )
    for _, seed, place in every[:10]:
        write_short_log({"seed": seed}, [{"step": 4, "reward": 0.5}], place)
    assert study.missing_runs(["main"], tmp_path, None, None) == every[10:]
    few = study.missing_runs(["main"], tmp_path, [4], ["int3_acr"])
    assert [(arm.name, seed) for arm, seed, _ in few] == [
        ("int3_acr", 4),
        ("int3_acr_uaq", 4),
    ]


def test_short_logs_keep_what_is_needed(tmp_path):
    rows = [
        {"step": 4, "reward": 0.123456789, "learning_rate": 1e-4},
        {"step": 4, "expected_accuracy": 0.5},
        {"step": 8, "grad_norm": None},
    ]
    write_short_log({"seed": 1}, rows, tmp_path / "x.jsonl.gz")
    run = read_run(tmp_path / "x.jsonl.gz")
    assert run.settings == {"seed": 1}
    assert run.rows == [{"step": 4, "reward": 0.12346, "expected_accuracy": 0.5}]
    assert [shortened(value) for value in (1234567.0, 1.23456789e-9, 0.0)] == [1234600.0, 1.2346e-9, 0.0]


def write_runs(directory, accuracies, experiment="main"):
    """Two updates a rollout, thirty rollouts; the first ten are far off, which the means must leave out."""
    for arm, values in accuracies.items():
        for seed, value in enumerate(values):
            rows = [
                {
                    "step": 2 * rollout,
                    "expected_accuracy": value + (1.0 if rollout <= 10 else 0.01 * (-1) ** rollout),
                    "mismatch/kl_k3": 0.1 if rollout <= 10 else 0.3,
                    "mismatch/ratio_max": 5.0 + seed if rollout == 3 else 1.0,
                    "clip_ratio/region_mean": 0.02,
                    "step_time": 0.5,
                }
                for rollout in range(1, 31)
            ]
            settings = {"seed": seed, "updates_per_rollout": 2, "date": "d", "commit": "c", "hardware": "h"}
            write_short_log(settings, rows, directory / experiment / f"{arm}-seed{seed}.jsonl.gz")


def test_tables_say_what_the_logs_say(tmp_path, capsys):
    write_runs(tmp_path, {"bf16": [0.8, 0.6], "int8_naive": [0.7, 0.4], "int8_tis": [0.75]})
    output = tmp_path / "out.json"
    summary.main(["--runs", str(tmp_path), "--output", str(output)])
    printed = capsys.readouterr().out
    # bf16: mean .7, standard error .1 / sqrt(2) * ... = sd .1414 / sqrt(2) = .1, times t(1) = 12.706.
    row = next(line for line in printed.splitlines() if line.startswith("| bf16 |"))
    assert row.split(" | ")[1:4] == ["2", "30", "0.700 ± 1.271"]
    assert "0.1 → 0.3" in row and " 6 " in row and "2.0%" in row
    # Differences -.1 and -.2: mean -.15, sd .0707, standard error .05, times 12.706.
    assert "| int8_naive - bf16 | 2 | -0.150 ± 0.635 | – |" in printed
    assert "| int8_tis - bf16 | 1 | -0.050 | – |" in printed
    assert "acr" not in printed, "an arm without runs was shown"
    record = json.loads(output.read_text())
    assert record["runs"]["count"] == 5
    assert math.isclose(record["runs"]["training_hours"], 5 * 30 * 0.5 * 2 / 3600)


def test_an_experiment_is_compared_with_the_one_beside_it(tmp_path, capsys):
    write_runs(tmp_path, {"int8_tis": [0.7, 0.5], "int3_tis": [0.1, 0.1]})
    write_runs(tmp_path, {"int8_stochastic_tis": [0.8, 0.5]}, experiment="actors")
    summary.main(["--runs", str(tmp_path)])
    printed = capsys.readouterr().out.split("### actors")[1]
    # Differences .1 and 0: mean .05, standard error .05, times t(1) = 12.706.
    assert "| int8_stochastic_tis - int8_tis | 2 | +0.050 ± 0.635 |" in printed
    assert "| int8_tis |" not in printed, "arms of another experiment are not repeated"


def test_p_values_are_students():
    # A mean of t standard errors: (1, 3) has mean 2, standard error 1. The 97.5 % quantiles of t are from a table.
    assert contrasts.p_value([1.0, 3.0]) == pytest.approx(1 - 2 / math.pi * math.atan(2))
    for count, quantile in ((2, 12.706), (3, 4.303), (4, 3.182), (5, 2.776), (6, 2.571), (7, 2.447)):
        values = [1.0, *[0.0] * (count - 1)]  # standard deviation 1 / sqrt(n), so its standard error is 1 / n
        shift = quantile / count - 1 / count
        assert contrasts.p_value([value + shift for value in values]) == pytest.approx(0.05, abs=1e-4)
        assert contrasts.p_value([-value - shift for value in values]) == pytest.approx(0.05, abs=1e-4)
    assert contrasts.p_value([0.5]) == contrasts.p_value([0.5, 0.5]) == 1.0, "no spread to judge by"


def test_holms_correction():
    # Sorted: .01 x 4, .02 x 3, .03 x 2 (as large as the one before), .5 x 1; at most 1.
    assert contrasts.holm([0.02, 0.5, 0.01, 0.03]) == pytest.approx([0.06, 0.5, 0.04, 0.06])
    assert contrasts.holm([0.6, 0.7]) == [1.0, 1.0]


def test_pooled_differences_count_seeds(tmp_path):
    for cap, (first, second) in {1.2: (0.7, 0.4), 2.0: (0.9, 0.2)}.items():
        write_runs(tmp_path, {f"int3a4_acr_c{cap:g}": [first, second]}, experiment="cap")
        write_runs(tmp_path, {f"int3a4_tis_c{cap:g}": [0.5, 0.5]}, experiment="cap")
    pairs, by_seed = contrasts.Study(tmp_path).pooled("acr − tis, over six caps")
    # Seed 0: .2 and .4, seed 1: -.1 and -.3.
    assert pairs == pytest.approx([0.2, -0.1, 0.4, -0.3]) and by_seed == pytest.approx([0.3, -0.2])


def figure(found):
    """A difference as benchmarks/study.md states it."""
    mean, half = summary.stated(found.values)
    text = f"{mean:+.3f} ± {half:.3f}".replace("+0.000", ".000").replace("-0.000", ".000")
    text = text.replace("0.", ".").replace("-", "−")
    windows = found.windows()
    text = f"**{text}**" if abs(mean) > half else text
    marks = "\\*" * (len(found.seeds) == 3) + "‡" * (abs(mean) > half and windows != list(contrasts.WINDOWS))
    return text + marks


def test_the_page_states_the_differences_of_the_logs(tmp_path):
    text = (ROOT / "benchmarks" / "study.md").read_text()
    text = text.partition("## Objectives and formats\n")[2].partition("\n## ")[0]
    page = tmp_path / "section.md"
    page.write_text(text)
    table = contrasts.Study().table()
    stated = {row[0]: row[1:] for row in rows(page) if row[0] in contrasts.TABLE}
    expected = {
        name: [figure(table[name, scheme]) if (name, scheme) in table else "" for scheme in summary.SCHEMES]
        for name in contrasts.TABLE
    }
    assert stated == expected
    corrected = contrasts.holm([contrasts.p_value(found.values) for found in table.values()])
    remaining = {cell for cell, p in zip(table, corrected, strict=True) if p < contrasts.LEVEL}
    ratio = "quantized_ratio − naive"
    assert remaining == {(ratio, "int4"), (ratio, "int3")}
    assert f"has {len(table)} differences" in text
    assert "leaves two: `quantized_ratio` − `naive` with INT4 and INT3" in text


@pytest.mark.parametrize("merges", [True, False], ids=["merged", "beside the base"])
def test_the_quantized_policy_is_measured_with_its_adapter(merges, tmp_path):
    tokenizer = task.build_tokenizer()
    config = LoraConfig(**LORA, init_lora_weights=False)
    policy = get_peft_model(warm_start.build_model(tokenizer, seed=0), config)
    problems = task.encode_problems(task.sample_problems(32, seed=0), tokenizer)
    scheme = SCHEMES["w4a16"]  # which leaves activations alone, so that rounding the weights says it all
    slow = copy.deepcopy(policy)
    slow = slow.merge_and_unload() if merges else slow
    for name, module in slow.named_modules():
        if isinstance(module, torch.nn.Linear) and "lora_" not in name and "lm_head" not in name:
            module.weight.data = scheme.dequantize(scheme.quantize(module.weight.data))
    expected = evaluate.measure_policy(slow, problems).expected
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    base = policy.get_base_model()
    forward = base.forward
    base.forward = lambda **inputs: forward(**inputs)  # as TRL replaces it: a copy still computes with this very model
    recorder = BothPolicies(scheme, merges, problem_ids=problems, rollouts=1)
    row = recorder.measure(policy)
    assert row["quantized_expected_accuracy"] == pytest.approx(expected, rel=1e-5, abs=0)
    assert row["expected_accuracy"] == evaluate.measure_policy(policy, problems).expected
    assert row["expected_accuracy"] != pytest.approx(expected, rel=1e-4, abs=0), "rounding changes nothing here"
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


@pytest.mark.vllm
@pytest.mark.slow
def test_the_study_runs(tmp_path):
    command = [sys.executable, "-m", "benchmarks.objectives.study", "cap", "--arms", "int3a4_acr_c2", "--seeds", "0"]
    command += ["--rollouts", "2", "--jobs", "1", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    run = read_run(tmp_path / "cap" / "int3a4_acr_c2-seed0.jsonl.gz")
    assert len(run.series("expected_accuracy")) == 2 and run.settings["activation_bits"] == 4
    # Activations of four bits put the actor much further from the policy than INT8 does.
    assert run.series("mismatch/kl_k3")[0][1] > 0.02
