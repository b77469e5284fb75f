"""The study of objectives: its coarse quantizers, its missing runs and its tables."""

import copy
import json
import math

import pytest
import torch
from documents import ROOT, rows
from peft import LoraConfig, get_peft_model

from benchmarks.objectives import contrasts, study, summary
from benchmarks.objectives.coarse import CODE_BITS, add_coarse_schemes, round_activations
from benchmarks.objectives.one_run import LORA, write_short_log
from benchmarks.objectives.recorder import BothPolicies
from trl_qurl.lab.demo import evaluate, task, warm_start
from trl_qurl.quantization.formats import SCHEMES, get_scheme


@pytest.fixture
def coarse(monkeypatch):
    # restored after the test
    monkeypatch.setattr("trl_qurl.quantization.formats.SCHEMES", dict(SCHEMES))
    add_coarse_schemes()


@pytest.mark.parametrize(("name", "bits"), CODE_BITS.items())
def test_the_number_of_bits_of_coarse_codes(name, bits, coarse):
    weight = torch.randn(16, 400, generator=torch.Generator().manual_seed(0))
    scheme = get_scheme(name)
    rounded = scheme.quantize(weight)
    codes, scale = rounded["weight"], rounded["weight_scale"]
    assert codes.dtype == torch.int8 and len(codes.unique()) == 2**bits
    # The largest code stands for absmax less half a step, as with INT8, which is the largest error.
    half = 2 ** (bits - 1)
    torch.testing.assert_close(scale, weight.abs().amax(1, keepdim=True) / (half - 0.5))
    assert ((scheme.dequantize(rounded) - weight).abs() <= scale / 2 + 1e-6).all()
    # The engine's INT8 kernel rounds activations to eight bits in any case.
    assert torch.equal(
        scheme.quantize_activations(weight), SCHEMES["int8"].quantize_activations(weight)
    )
    four_bits, step = round_activations(weight, bits=4), weight.abs().amax(-1, keepdim=True) / 7
    torch.testing.assert_close((four_bits / step).round(), four_bits / step, atol=1e-4, rtol=0)
    assert all(len(row.unique()) <= 15 for row in four_bits)


def test_no_study_of_int8_trains_where_its_sums_saturate(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    with pytest.raises(SystemExit, match="no VNNI"):
        study.main(["main", "--arms", "int8_tis", "--output", "nowhere"])


def write_runs(directory, accuracies, experiment="main"):
    """Write runs of forty rollouts with two updates each; means must leave out the first twenty."""
    for arm, values in accuracies.items():
        for seed, value in enumerate(values):
            rows = [
                {
                    "step": 2 * rollout,
                    "expected_accuracy": value + (1.0 if rollout <= 20 else 0.01 * (-1) ** rollout),
                    "mismatch/kl_k3": 0.1 if rollout <= 20 else 0.3,
                    "mismatch/ratio_max": 5.0 + seed if rollout == 3 else 1.0,
                    "step_time": 0.5,
                }
                for rollout in range(1, 41)
            ]
            settings = {
                "seed": seed,
                "updates_per_rollout": 2,
                "date": "d",
                "commit": "c",
                "hardware": "h",
            }
            write_short_log(settings, rows, directory / experiment / f"{arm}-seed{seed}.jsonl.gz")


def test_the_tables_of_some_logs(tmp_path, capsys):
    write_runs(tmp_path, {"bf16": [0.8, 0.6], "int8_naive": [0.7, 0.4], "int8_tis": [0.75]})
    output = tmp_path / "out.json"
    summary.main(["--runs", str(tmp_path), "--output", str(output)])
    printed = capsys.readouterr().out
    # bf16: mean .7, standard error .1 / sqrt(2) * ... = sd .1414 / sqrt(2) = .1, times t(1) =
    # 12.706.
    assert (
        "| bf16 | 2 | 40 | 0.700 ± 1.271 |" in printed
        and "0.1 → 0.3" in printed
        and "| 6 |" in printed
    )
    # Differences -.1 and -.2: mean -.15, sd .0707, standard error .05, times 12.706.
    assert "| int8_naive - bf16 | 2 | -0.150 ± 0.635 | – |" in printed
    assert "| int8_tis - bf16 | 1 | -0.050 | – |" in printed
    assert "acr" not in printed, "an arm without runs was shown"
    assert json.loads(output.read_text())["runs"]["training_hours"] == pytest.approx(
        5 * 40 * 0.5 * 2 / 3600
    )


def test_p_values_are_students():
    # A mean of t standard errors: (1, 3) has mean 2, standard error 1. The 97.5 % quantiles of t
    # are from a table.
    assert contrasts.p_value([1.0, 3.0]) == pytest.approx(1 - 2 / math.pi * math.atan(2))
    for count, quantile in (
        (2, 12.706),
        (3, 4.303),
        (4, 3.182),
        (5, 2.776),
        (6, 2.571),
        (7, 2.447),
    ):
        # standard deviation 1 / sqrt(n), so its standard error is 1 / n
        values = [1.0, *[0.0] * (count - 1)]
        shift = quantile / count - 1 / count
        assert contrasts.p_value([value + shift for value in values]) == pytest.approx(
            0.05, abs=1e-4
        )
        assert contrasts.p_value([-value - shift for value in values]) == pytest.approx(
            0.05, abs=1e-4
        )
    assert contrasts.p_value([0.5]) == contrasts.p_value([0.5, 0.5]) == 1.0, "no spread to judge by"
    arms = {"bf16_again": {0: 8.0, 1: 12.0}, "bf16": {0: 1.0, 1: 3.0}, "tis": {1: 4.0, 2: 0.0}}
    # variances 8 and 2: the standard error is √5
    two = summary.samples_of(arms, "bf16_again", "bf16", float)
    assert summary.stated(*two) == pytest.approx([8.0, 4.303 * math.sqrt(5)])
    assert contrasts.p_value(*two) == pytest.approx(1 - 8 / math.sqrt(5) / math.sqrt(8 * 8 / 5 + 2))
    assert summary.samples_of(arms, "tis", "bf16", float) == ([1.0], []), (
        "other arms are paired by seed"
    )
    # Holm's correction. Sorted: .01 x 4, .02 x 3, .03 x 2 (as large as the one before), .5 x 1; at
    # most 1.
    assert contrasts.holm([0.02, 0.5, 0.01, 0.03]) == pytest.approx([0.06, 0.5, 0.04, 0.06])
    assert contrasts.holm([0.6, 0.7]) == [1.0, 1.0]


def figure(found):
    """A difference as benchmarks/study.md states it."""
    mean, half = summary.stated(*found.samples)
    text = f"{mean:+.3f} ± {half:.3f}".replace("+0.000", ".000").replace("-0.000", ".000")
    text = text.replace("0.", ".").replace("-", "−")
    text = f"**{text}**" if abs(mean) > half else text
    varies = abs(mean) > half and found.windows() != list(contrasts.WINDOWS)
    return text + "\\*" * (len(found.samples[0]) == 3) + "‡" * varies


def test_the_page_states_the_differences_of_the_logs():
    page = ROOT / "benchmarks" / "study.md"
    stored = contrasts.Study()
    table, text = stored.table(), page.read_text()
    stated = {
        row[0]: row[1:] for row in rows(page, "Objectives and formats") if row[0] in contrasts.TABLE
    }
    expected = {
        name: [
            figure(table[name, scheme]) if (name, scheme) in table else ""
            for scheme in summary.SCHEMES
        ]
        for name in contrasts.TABLE
    }
    assert stated == expected
    corrected = contrasts.holm([contrasts.p_value(*found.samples) for found in table.values()])
    remaining = {cell for cell, p in zip(table, corrected, strict=True) if p < contrasts.LEVEL}
    assert remaining == {("quantized_ratio − naive", "int4"), ("quantized_ratio − naive", "int3")}
    assert f"has {len(table)} differences" in text
    assert "leaves two: `quantized_ratio` − `naive` with INT4 and INT3" in text
    ten, pairs = stored.arms("seeds"), summary.CONTRASTS["seeds"]
    accuracies = [
        summary.plus_minus(summary.summarize(runs)["accuracy"]).replace("0.", ".")
        for runs in ten.values()
    ]
    differences = [figure(stored.accuracy("seeds", *pair)).rstrip("‡") for pair in pairs]
    assert [row[1] for row in rows(page, "Ten independent seeds")] == [*accuracies, *differences]
    before, since = (contrasts.correlation(stored.arms(name)["bf16"]) for name in ("main", "seeds"))
    assert f"{before:.3f}; since then {since:+.3f})".replace("0.", ".").replace("-", "−") in text


@pytest.mark.parametrize("merges", [True, False], ids=["merged", "beside the base"])
def test_the_quantized_policy_is_measured_with_its_adapter(merges, tmp_path):
    tokenizer = task.build_tokenizer()
    config = LoraConfig(**LORA, init_lora_weights=False)
    torch.manual_seed(0)  # for the adapter
    policy = get_peft_model(warm_start.build_model(tokenizer, seed=0), config)
    problems = task.encode_problems(task.sample_problems(32, seed=0), tokenizer)
    scheme = SCHEMES["w4a16"]  # rounds weights only
    slow = copy.deepcopy(policy)
    slow = slow.merge_and_unload() if merges else slow
    for name, module in slow.named_modules():
        if isinstance(module, torch.nn.Linear) and "lora_" not in name and "lm_head" not in name:
            module.weight.data = scheme.dequantize(scheme.quantize(module.weight.data))
    expected = evaluate.measure_policy(slow, problems).expected
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    base = policy.get_base_model()
    forward = base.forward
    # TRL replaces it too, and a copy still calls this model
    base.forward = lambda **inputs: forward(**inputs)
    recorder = BothPolicies(scheme, merges, problem_ids=problems, rollouts=1)
    row = recorder.measure(policy)
    assert row["quantized_expected_accuracy"] == pytest.approx(expected, rel=1e-5, abs=0)
    assert row["expected_accuracy"] == evaluate.measure_policy(policy, problems).expected
    assert row["expected_accuracy"] != pytest.approx(expected, rel=1e-4, abs=0), (
        "rounding changes nothing here"
    )
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
