"""`trl-qurl bench`: predictions against arithmetic by hand, errors before slow work, and one real
run.
"""

import json
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch
from conftest import completed, needs_avx512
from hypothesis import given
from hypothesis import strategies as st
from tiny import ENGINE, tiny_model

from trl_qurl.lab.bench import run
from trl_qurl.lab.bench.measure import measure_training
from trl_qurl.lab.bench.prediction import (
    WORTHWHILE,
    EngineCosts,
    Range,
    Timing,
    TrainingCosts,
    advice,
    build_table,
    compare,
    per_token,
    predict_step,
    sentences,
)
from trl_qurl.lab.bench.run import bench, run_job, save_config
from trl_qurl.lab.bench.workload import Device, Job, Workload, count_parameters, why_too_large
from trl_qurl.lab.device import cpu_settings

WORKLOAD = Workload(
    prompt_len=100, completion_len=200, batch=32, generations=8, train_batch=4, updates=2
)


def timing(size, *seconds):
    return Timing(size, list(seconds))


def engine(prompts=1.0, rate=0.1, sync=2.0, lengths=(1, 8, 200), spread=0.0):
    """An engine of constant cost per token."""

    def times(seconds):
        return [seconds * (1 - spread), seconds, seconds * (1 + spread)]

    generation = [Timing(length, times(prompts + rate * (length - 1))) for length in lengths]
    return EngineCosts(generation, Timing(1, times(sync)), 100)


def gain(before, after, training):
    """The comparison of two engines' steps."""
    steps = (predict_step(costs, training, WORKLOAD) for costs in (before, after))
    return compare(*steps, whole_step=training is not None)


TRAINING = TrainingCosts(timing(300, 0.3), timing(300, 1.5), timing(1, 0.7))


# Costs
# --------------------------------------------------------------------------------------------------


@given(st.floats(0.001, 0.1), st.floats(0, 1e-3), st.integers(100, 2000))
def test_the_range_includes_a_cost_that_grows_with_the_context(rate, growth, tokens):
    """T(L) = 1 + (L - 1)(r + g L / 2), beyond the lengths measured."""

    def true(length):
        return 1 + (length - 1) * (rate + growth * length / 2)

    costs = EngineCosts([timing(n, true(n)) for n in (1, 32, 100)], timing(1, 1.0), 0)
    estimate = costs.generate(tokens)
    assert estimate.low <= true(tokens) * 1.001
    assert estimate.high >= true(tokens) * 0.999
    assert estimate.middle == pytest.approx(true(tokens), rel=0.02)
    assert engine(prompts=3.0, rate=rate).generate(tokens) == pytest.approx(
        [3.0 + rate * (tokens - 1)] * 3
    )


def test_noise_never_makes_the_cost_of_a_token_negative():
    assert per_token(timing(1, 5.0), timing(8, 4.0)) == (0, 0, 0)


# Prediction
# --------------------------------------------------------------------------------------------------


def test_a_step_is_the_sum_of_its_parts():
    step = predict_step(engine(), TRAINING, WORKLOAD)
    passes = 32 // 4
    assert step.sync.middle == 2.0
    assert step.generate.middle == pytest.approx(1 + 0.1 * 199)
    # 1,200 tokens in a pass, 300 measured
    assert step.score.middle == pytest.approx(passes * 0.3 * 4)
    assert step.update.middle == pytest.approx(passes * 1.5 * 4 + 2 * 0.7)
    parts = [step.sync, step.generate, step.score, step.update]
    assert step.total.middle == pytest.approx(sum(part.middle for part in parts))

    single = predict_step(engine(), TRAINING, replace(WORKLOAD, updates=1))
    assert single.score == Range(0.0, 0.0, 0.0), "a single update needs no scoring pass"
    assert single.update.middle == pytest.approx(8 * 1.5 * 4 + 0.7)


def test_the_speedup_of_a_step_has_a_range_over_all_repetitions():
    before, after = engine(spread=0.2), engine(rate=0.05, sync=3.0, spread=0.1)
    comparison = gain(before, after, TRAINING)
    one, other = predict_step(before, TRAINING, WORKLOAD), predict_step(after, TRAINING, WORKLOAD)
    rest = 8 * 0.3 * 4 + 8 * 1.5 * 4 + 2 * 0.7
    ratios = [
        (sync + generate + rest) / (other_sync + other_generate + rest)
        for sync, generate, other_sync, other_generate in product(
            one.sync, one.generate, other.sync, other.generate
        )
    ]
    low, middle, high = comparison.speedup
    assert (low, high) == pytest.approx((min(ratios), max(ratios)))
    assert middle == pytest.approx((2 + 20.9 + rest) / (3 + 10.95 + rest))
    assert comparison.rollout_speedup == pytest.approx(20.9 / 10.95)


@pytest.mark.parametrize(
    ("rate", "spread", "said"),
    [(0.01, 0.01, "yes"), (0.1, 0.01, "no"), (0.15, 0.01, "no"), (0.05, 0.3, "unclear")],
)
def test_advice(rate, spread, said):
    light = TrainingCosts(timing(1200, 0.01), timing(1200, 0.05), timing(1, 0.01))
    found = gain(engine(spread=spread), engine(rate=rate, spread=spread), light)
    assert found.advice == said
    sentence = advice(found, whole_step=True)
    assert sentence.startswith(
        {"yes": "Worth it", "no": "Not worth it", "unclear": "Unclear"}[said]
    )
    assert (
        f"{found.speedup.middle:.2f} ({found.speedup.low:.2f}-{found.speedup.high:.2f})" in sentence
    )
    assert (found.speedup.low >= WORTHWHILE) == (said == "yes")


# Bad input
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch": 0}, "batch is 0: give a positive number"),
        ({"completion_len": 8}, "completion_len is 8: give more than 8 tokens"),
        (
            {"batch": 60},
            r"60 completions cannot be divided into groups of 8: .* multiple of --generations",
        ),
        (
            {"train_batch": 6},
            r"split into 4 updates with passes of 6: make --batch a multiple of 24",
        ),
    ],
)
def test_a_workload_that_does_not_fit(given, message):
    with pytest.raises(ValueError, match=message):
        Workload(**given)


def test_a_model_that_cannot_be_measured_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"Unknown quantization scheme 'int3'; did you mean 'int8'\?"
    ):
        bench("model", Workload(), schemes=["int3"])
    tiny_model().config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"256 and completions of 512 .* context of 128: shorten"):
        save_config(str(tmp_path), Workload(), str(tmp_path / "copy"))
    with pytest.raises(ValueError, match="nothing to quantize"):
        bench(str(tmp_path), Workload(16, 16), ["int8"], ignore=("re:.*",))


def test_the_output_of_a_failed_process_is_shown(warm_python, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(sys, "executable", str(warm_python))
    with pytest.raises(ChildProcessError, match="rollouts in INT8 failed"):
        run_job(Job("int8", str(tmp_path / "nowhere"), Workload()))
    assert "nowhere" in capfd.readouterr().err


# Memory and failures
# -------------------------------------------------------------------------------------------------

H100 = Device("the GPU (NVIDIA H100 80GB HBM3)", 80 * 10**9, is_gpu=True)
ADAPTER = Workload(lora_rank=16)


@pytest.fixture(scope="module")
def qwen_7b(tmp_path_factory):
    """The config of Qwen2.5-7B: 7.62 billion parameters."""
    from transformers import Qwen2Config

    directory = tmp_path_factory.mktemp("7b")
    sizes = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "vocab_size": 152064,
    }
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False}
    Qwen2Config(**sizes, **heads).save_pretrained(directory)
    return str(directory)


@pytest.fixture
def h100(monkeypatch):
    """Replace the device by an H100 and measurements by `answer(job)`, and return the jobs."""
    monkeypatch.setattr(run, "find_device", lambda: H100)

    def ask(answer):
        jobs = []
        monkeypatch.setattr(run, "run_job", lambda job: jobs.append(job) or answer(job))
        return jobs

    return ask


def rates(job):
    """Rollouts take 21 s in 16 bits and 11 s in other formats, and training takes 9 s."""
    if job.part == "training":
        return TrainingCosts(timing(768, 0.2), timing(768, 1.0), timing(1, 1.0))
    return engine(rate=20 / 511 if job.part == "none" else 10 / 511, sync=0.5, lengths=(1, 8, 512))


def test_only_the_engine_is_measured_if_training_does_not_fit(h100, qwen_7b, tmp_path):
    jobs = h100(rates)
    said = []
    result = bench(qwen_7b, Workload(), ["fp8"], say=said.append, output=tmp_path / "bench.json")
    assert [(job.part, job.holds_policy) for job in jobs] == [("none", False), ("fp8", False)]
    # 7.62e9 * 16 bytes = 122 GB; the engine leaves 80 * (1 - 0.3 - 0.1) = 48 GB, enough for 4 bytes
    # each (30 GB).
    needs = (
        "A training step of 7.62 billion parameters needs 122 GB for weights, gradients and AdamW"
    )
    assert said[0].startswith(needs)
    assert "the 80 GB of the GPU (NVIDIA H100 80GB HBM3), so only the engine is measured" in said[0]
    assert said[0].endswith("Use --lora-rank 16 to measure a whole step.")
    [fp8] = result.comparisons.values()
    # 21.5 s of rollout and sync become 11.5 s.
    assert fp8.advice == "unclear" and fp8.speedup.middle == pytest.approx(21.5 / 11.5)
    assert "FP8: Rollout and sync are 1.87 (1.87-1.87) times as fast" in " ".join(sentences(result))
    assert (
        json.loads((tmp_path / "bench.json").read_text())["comparisons"]["fp8"]["advice"]
        == "unclear"
    )
    small = gain(engine(), engine(rate=0.099), None)
    assert advice(small, whole_step=False).startswith(
        "Not worth it for speed: rollout and sync are 1.01 (1.01-1.01)"
    )


@needs_avx512
def test_unsuitable_formats_are_left_out_unless_requested(h100, tmp_path, monkeypatch):
    """SmolLM2-135M's width of 576 is not a multiple of 128."""
    tiny_model(hidden_size=576, intermediate_size=1536, head_dim=64).config.save_pretrained(
        tmp_path
    )
    said = []
    jobs = h100(rates)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    bench(str(tmp_path), Workload(64, 64), say=said.append)
    assert [job.part for job in jobs] == ["none", "int8", "training"]
    assert said[0].startswith(
        "W4A16 is left out: w4a16 cannot quantize 10 of the 14 layers, first model.layers.0."
    )
    compiled = "Measuring rollouts in INT8 (2 of 3), compiling: about a minute, once"  # on a GPU
    assert said[2:] == [compiled, "Measuring scoring and updates (3 of 3)"]
    bench(str(tmp_path), Workload(64, 64), engine_kwargs={"enforce_eager": True}, say=said.append)
    assert said[-3:-1] == [
        "Measuring rollouts in 16 bits (1 of 3)",
        "Measuring rollouts in INT8 (2 of 3)",
    ]
    with pytest.raises(
        ValueError, match="w4a16 cannot quantize 10 of the 14 layers.*Choose another format"
    ):
        bench(str(tmp_path), Workload(64, 64), ["int8", "w4a16"])


def test_an_adapter_is_measured_whole_if_its_base_fits(h100, qwen_7b):
    jobs = h100(rates)
    result = bench(qwen_7b, ADAPTER, ["fp8"])
    assert [job.part for job in jobs] == ["none", "fp8", "training"] and all(
        job.holds_policy for job in jobs
    )
    assert result.too_large is None and result.comparisons["fp8"].step.update.middle > 0
    with torch.device("meta"):
        giant = torch.nn.Sequential(torch.nn.Linear(2**18, 2**18))  # 69 billion weights
    reason = why_too_large(giant, 0, H100)
    assert "needs 1100 GB for weights" in reason and reason.endswith("Use a smaller model.")


@pytest.mark.parametrize("broken", ["none", "fp8", "training"])
def test_measurements_are_kept_when_another_part_fails(h100, qwen_7b, tmp_path, broken):
    def answer(job):
        kept = tmp_path / "bench.json"
        if broken == job.part:
            assert broken == "none" or "none" in json.loads(kept.read_text())["measurements"], (
                "written after each part"
            )
            raise ChildProcessError("out of memory")
        return rates(job)

    h100(answer)
    result = bench(qwen_7b, ADAPTER, ["fp8", "int8"], output=tmp_path / "bench.json")
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["failures"] == {broken: "out of memory"}
    assert set(record["measurements"]) == {"none", "fp8", "int8"} - {broken}
    assert (record["training"] is None) == (broken == "training")
    assert broken == "none" or any(
        "not measured. out of memory" in line for line in sentences(result)
    )
    assert (result.baseline is None and not result.comparisons) == (broken == "none")
    build_table(result)


def test_a_bench_without_any_measurement_is_an_error(h100, qwen_7b):
    def fail(job):
        raise ChildProcessError("no engine")

    h100(fail)
    with pytest.raises(ChildProcessError, match="no engine"):
        bench(qwen_7b, Workload(), ["fp8"])


# Training
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"lora_rank": 4}], ids=["whole", "adapter"])
def test_training_is_measured_as_the_trainer_computes(tmp_path, monkeypatch, given):
    tiny_model().config.save_pretrained(tmp_path)
    stepped, seen = [], set()
    real = torch.optim.AdamW

    def recorded(parameters, **settings):
        stepped.extend(parameters)
        return real(stepped, **settings)

    monkeypatch.setattr(torch.optim, "AdamW", recorded)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: (
            seen.add(output.dtype) if isinstance(module, torch.nn.Linear) else None
        )
    )
    try:
        costs = measure_training(
            Job("training", str(tmp_path), Workload(8, 16, 8, 8, 8, 1, **given))
        )
    finally:
        handle.remove()
    assert costs.score.size == costs.update.size == 8 * 24, (
        "a tiny model's passes are measured whole"
    )
    assert (torch.bfloat16 in seen) == bool(cpu_settings().get("bf16"))
    whole, adapter = count_parameters(tiny_model(), given.get("lora_rank", 0))
    held = sum(parameter.numel() for parameter in stepped)
    assert all(parameter.dtype == torch.float32 for parameter in stepped)
    assert held == (adapter if given else whole)


# The command
# --------------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.xdist_group("bench")
@pytest.mark.parametrize(
    "further",
    [[], pytest.param(["--lora-rank", "4"], marks=pytest.mark.slow)],
    ids=["whole", "adapter"],
)
def test_the_command(warm_python, tmp_path, further):
    tiny_model().config.save_pretrained(tmp_path / "model")
    command = [
        warm_python,
        "-m",
        "trl_qurl",
        "bench",
        tmp_path / "model",
        "-o",
        tmp_path / "bench.json",
    ]
    command += ["--scheme", "int8", "--prompt-len", "16", "--completion-len", "40"]
    command += ["--batch", "16", "--train-batch", "4"]
    command += ["--engine-kwargs", json.dumps(ENGINE), *further]
    done = completed(*command, COLUMNS="80")
    assert "one step of 16 completions, 40 tokens each" in " ".join(done.stdout.split())
    assert "…" not in done.stdout, "a column does not fit into 80 characters"
    record = json.loads((tmp_path / "bench.json").read_text())
    assert set(record["measurements"]) == {"none", "int8"}, done.stderr[-3000:]
    for measurement in record["measurements"].values():
        lengths = [timing["size"] for timing in measurement["generation"]]
        assert lengths == [1, 8, 40], (
            "a tiny model's completions are short enough to be measured whole"
        )
    bf16, int8 = (record["measurements"][name]["weight_bytes"] for name in ("none", "int8"))
    held = sum(
        p.numel() for n, p in tiny_model().named_parameters() if "proj" in n and "bias" not in n
    )
    channels = sum(
        p.shape[0] for n, p in tiny_model().named_parameters() if "proj" in n and "bias" not in n
    )
    # one byte less per weight, a float32 scale per channel
    assert bf16 - int8 == held - 4 * channels
    comparison = record["comparisons"]["int8"]
    low, middle, high = comparison["speedup"]
    assert 0 < low <= middle <= high
    assert comparison["advice"] in ("yes", "no", "unclear")
    assert "INT8: " in done.stdout
