"""`trl-qurl mismatch`: what rounding does to a model, before training."""

import json
import math
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from conftest import completed, needs_avx512, needs_vnni
from documents import ROOT
from tiny import save_tiny, tiny_model, tiny_tokenizer, with_outliers

from benchmarks.large_keys import enlarge_keys
from trl_qurl import cli
from trl_qurl.lab.evaluation.scores import Estimate
from trl_qurl.lab.evaluation.tasks import encode_prompt
from trl_qurl.lab.mismatch.engines import Answer, score
from trl_qurl.lab.mismatch.finer import choose_finer, within_kl
from trl_qurl.lab.mismatch.prompts import BUILT_IN, load_prompts
from trl_qurl.lab.mismatch.report import Choice, Report, Step
from trl_qurl.lab.mismatch.run import MEASURED_CACHES
from trl_qurl.lab.mismatch.statistics import Scored, measure
from trl_qurl.lab.mismatch.table import sentences
from trl_qurl.lab.recipes.arguments import parse
from trl_qurl.lab.rounded_cache import ROUNDINGS, rounded_cache

BUDGET = 3e-5  # nats per token, between the tiny model's KL with its outliers and without

# Figures
# --------------------------------------------------------------------------------------------------


def scored(*answers):
    """Answers to different questions, given by log ρ of their tokens."""
    return [
        Scored((number,), torch.as_tensor(row, dtype=torch.float64))
        for number, row in enumerate(answers)
    ]


def answers_of(sigma, count=400):
    """Scored answers whose log ρ are normal, with E[ρ] = 1 as for samples of the engine."""
    generator = torch.Generator().manual_seed(0)
    noise = sigma * torch.randn(count, 64, generator=generator, dtype=torch.float64)
    return scored(*(noise - sigma**2 / 2))


def answers_to_questions_that_differ(seed, questions=16, samples=4, length=16):
    """The scatter of log ρ, and with it the KL σ² / 2, differs from question to question; its mean
    is .045.
    """
    generator = torch.Generator().manual_seed(seed)
    kls = 0.045 * torch.empty(questions).exponential_(generator=generator)
    sigma = (2 * kls).sqrt()[:, None, None].double()
    noise = sigma * torch.randn(
        questions, samples, length, generator=generator, dtype=torch.float64
    )
    log_ratios = noise - sigma**2 / 2
    return [Scored((number,), row) for number, rows in enumerate(log_ratios) for row in rows]


def test_the_estimate_finds_the_kl_of_normal_log_ratios():
    found = measure(answers_of(0.2))
    assert found.kl_k3.low < 0.02 < found.kl_k3.high, "KL is sigma² / 2"
    assert found.kl_k3.low < found.kl_k3.value < found.kl_k3.high
    assert found.answers == 400
    assert found.tokens == 400 * 64
    assert found.ess == pytest.approx(math.exp(-0.04), abs=0.01)
    assert found.ratio_quantiles[0.5] == pytest.approx(math.exp(-0.02), abs=0.01)
    assert found.ratio_quantiles[0.99] == pytest.approx(math.exp(-0.02 + 0.2 * 2.326), rel=0.02)


def test_the_interval_holds_the_truth_where_questions_differ():
    found = [measure(answers_to_questions_that_differ(seed)).kl_k3 for seed in range(300)]
    inside = [kl.low <= 0.045 <= kl.high for kl in found]
    assert 0.92 <= sum(inside) / len(inside) <= 0.98


@pytest.mark.parametrize(
    ("answers", "name", "expected"),
    [
        # Float32's own rounding of ρ, 6e-8, is as large as this KL times a thousand.
        ([[1e-5, -1e-5]], "kl_k3", 0.5e-10),
        ([[1.0], [0.0] * 9], "kl_k3", (math.e - 2) / 10),  # answers count by their tokens
        ([[0.0, 0.5, 0.8, -1.0]], "capped_share", 0.25),  # of ρ = 1, 1.6, 2.2 and 0.4
    ],
)
def test_figures_worked_out_by_hand(answers, name, expected):
    found = getattr(measure(scored(*answers)), name)
    assert getattr(found, "value", found) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("answers", "named"), [([[math.nan, 0.0]], "not finite"), ([], "empty")])
def test_what_gives_no_figures_is_refused(answers, named):
    with pytest.raises(ValueError, match=named):
        measure(scored(*answers))


def test_answers_are_scored_as_the_model_says():
    model = tiny_model().eval()
    prompt = [5, 6, 7]
    answer = [8, 9, 10, 11]
    with torch.no_grad():
        logps = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    expected = [float(logps[2 + step, token]) + 1 for step, token in enumerate(answer)]
    [row] = score(model, [Answer(prompt, [], []), Answer(prompt, answer, [-1.0] * 4)])
    assert row.log_ratio.tolist() == pytest.approx(expected, abs=1e-5)
    assert row.question == (5, 6, 7)


# Questions
# --------------------------------------------------------------------------------------------------


def test_prompts_come_from_the_package_a_text_or_a_task(tmp_path):
    assert load_prompts(None, 3) == [[{"role": "user", "content": text}] for text in BUILT_IN[:3]]
    text = tmp_path / "mine.txt"
    text.write_text("1+1=\n\n2+2=\n3+3=\n")
    assert load_prompts(str(text), 2) == ["1+1=", "2+2="]
    rows = tmp_path / "mine.jsonl"
    rows.write_text(json.dumps({"question": "1+1?"}) + "\n")
    [[message]] = load_prompts(str(rows), 5)  # answers are not needed
    assert message["content"].startswith("1+1?")


def test_a_plain_text_stays_as_it_is_without_a_chat_template():
    tokenizer = tiny_tokenizer()
    assert encode_prompt(tokenizer, "1+1=") == tokenizer("1+1=")["input_ids"]
    tokenizer.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert encode_prompt(tokenizer, "1+1=") == tokenizer("[1+1=]")["input_ids"]


# The verdict
# --------------------------------------------------------------------------------------------------


def mismatch_of(low, value, high):
    return replace(measure(answers_of(0.1, count=20)), kl_k3=Estimate(value, low, high))


def report_of(**formats):
    return Report("MODEL", {}, {name: mismatch_of(*kl) for name, kl in formats.items()})


@pytest.mark.parametrize(
    ("kl", "verdict"),
    [
        ((0.0005, 0.001, 0.0049), "safe"),
        ((0.0005, 0.001, 0.0051), "keep the correction"),
        ((0.019, 0.03, 0.04), "keep the correction"),
        ((0.021, 0.03, 0.04), "risky"),
    ],
)
def test_the_verdict_waits_until_the_interval_is_clear(kl, verdict):
    line, _ = sentences(report_of(int8=kl))
    assert line.startswith(f"INT8: {verdict}")
    assert f"KL of {kl[1]}" in line


@pytest.mark.parametrize(("limit", "is_missed"), [(0.0009, True), (0.0011, False)])
def test_a_list_that_misses_its_budget_is_not_passed_off_as_one_that_does(limit, is_missed):
    report = report_of(int8=(0.0005, 0.001, 0.0015))
    report.choice = Choice("int8", {"*": "int8"}, 0, (), limit)
    assert ("--kl 0.0009" in sentences(report)[1]) == is_missed


@pytest.mark.parametrize(("kl", "advice"), [(0.0031, "leave kv_cache_dtype out"), (0.003, "fine")])
def test_a_cache_is_recommended_only_if_the_finest_weights_have_its_kl(kl, advice):
    report = report_of(none=(0, 0.0001, 1), int8=(0, 0.003, 1), fp8=(0, 0.004, 1))
    report.caches["fp8"] = mismatch_of(0, kl, 1)
    report.settings["prompt_tokens"] = 2000.4
    _, _, line, context, _ = sentences(report)
    assert line.startswith(f"Cache fp8: {advice}")
    assert line.endswith("that of INT8 weights, 0.003.")
    assert "2000 tokens" in context


# Where it comes from
# -------------------------------------------------------------------------------------------------


def test_a_kl_is_reached_with_the_fewest_groups():
    steps = [Step((str(kl),), "none", kl, 1) for kl in (5.0, 30.0, 4.0, 1.0)]
    for budget, taken in ((40.0, 0), (39.0, 1), (5.0, 2), (0.0, 4)):
        assert within_kl(steps, budget) == steps[:taken]


@pytest.mark.parametrize(
    ("reached", "kept"),
    [((0.0025, 0.0015), [1, 2]), ((0.0025, 0.0025, 0.0025), [1, 2, 3])],
)
def test_lists_grow_until_an_engine_is_within_the_budget(reached, kept, monkeypatch):
    """Of a KL of 0.005, a 16-bit engine has 0.0005; the first step is all that the estimates ask
    for.
    """
    kls = (7.0, 1.0, 0.7, 0.5, 0.3)
    steps = [Step((str(number),), "none", kl, 100) for number, kl in enumerate(kls)]
    asked = []
    figures = iter(reached)

    def measure_engine(formats):
        asked.append(len(formats) - 1)
        return mismatch_of(0, next(figures), 1)

    monkeypatch.setattr("trl_qurl.lab.mismatch.finer.find_steps", lambda *given: steps)
    engines = Namespace(
        say=print, policy=None, prompts=[], weights=lambda scheme: None, measure=measure_engine
    )
    report = report_of(none=(0, 0.0005, 1), int8=(0.004, 0.005, 0.006))
    choice, mismatch = choose_finer(engines, "int8", report, 0.002)
    assert asked == kept
    assert mismatch.kl_k3.value == reached[-1]
    kept_layers = {str(number): "none" for number in range(kept[-1])}
    assert choice.formats == kept_layers | {"*": "int8"}


# The command
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--limit", "0"], "limit is 0"),
        (["--max-tokens", "4000"], "context of 128"),
        (["--questions", "nowhere.txt"], "nowhere.txt"),
        (["--questions", "empty.txt"], "empty.txt"),
        (["--output", "figures.png"], "--output is figures.png"),
        (["--kl", "0", "--scheme", "int8"], "--kl is 0"),
        (["--kl", "1e-3", "--scheme", "int8,fp8"], "int8, fp8"),
        (["--kl", "1e-3", "--scheme", '{"*": "int8"}'], '{"*": "int8"}'),
        (["--scheme", "none"], "--scheme is none"),
        (["--kv", "fp8,int4"], "--kv is 'int4'"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(
    arguments, named, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path)
    (tmp_path / "empty.txt").write_text("\n \n")
    assert cli.main(["mismatch", ".", *arguments]) == 2
    assert named in capsys.readouterr().err


def without_engines(monkeypatch):
    """Answers come from nowhere; what was asked of each engine is returned."""
    asked = []

    def answer(engine, prompts, failure):
        formats, arguments, *_ = engine.args
        asked.append((formats, len(prompts), arguments.get("kv_cache_dtype")))
        return [Answer(prompt, [8, 9, 10], [-4.0, -5.0, -4.5]) for prompt in prompts]

    monkeypatch.setattr("trl_qurl.lab.mismatch.engines.call_in_child", answer)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return asked


@needs_vnni
def test_caches_that_a_cpu_lacks_are_simulated(tmp_path, monkeypatch, capsys):
    """With keys hundreds wide in a few channels, one scale for all of a head is too coarse for
    INT8; FP8 has finer codes for small keys.
    """
    model = tiny_model("qwen2", hidden_size=256, head_dim=64)
    for layer in model.model.layers:  # attention of a random model is too even to be disturbed
        for tensor in layer.self_attn.q_proj.parameters():
            tensor.data *= 10
    enlarge_keys(model)
    save_tiny(tmp_path / "model", model=model)
    (tmp_path / "questions.txt").write_text("abcdefgh\nijklmnop\nqrstuvwx\nyz012345\n")
    asked = without_engines(monkeypatch)
    monkeypatch.chdir(tmp_path)
    command = "mismatch model --scheme int8 --questions questions.txt --max-tokens 4 --samples 1"
    caches = ("fp8", "fp8_per_token_head", "int8_per_token_head")
    assert cli.main([*command.split(), "--kv", ",".join(caches), "-o", "out.json"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert asked == [("none", 4, None), ("int8", 4, None), ("none", 4, "fp8")]
    found = json.loads((tmp_path / "out.json").read_text())["caches"]
    assert list(found) == ["fp8", "fp8_per_token_head, simulated", "int8_per_token_head, simulated"]
    eight, whole = (found[f"{name}, simulated"]["kl_k3"]["value"] for name in caches[1:])
    assert 0 < 10 * eight < whole, found
    assert "Cache int8_per_token_head, simulated: " in printed and "8 tokens on average" in printed


@pytest.mark.parametrize(("cache", "step"), [("fp8", 32), ("int8_per_token_head", 448 / 127)])
def test_how_a_cache_rounds(cache, step):
    values = torch.tensor([[300.0, 448.0], [5.0, 1000.0]])
    rounded = ROUNDINGS[cache](values)
    assert (rounded[0] / step).tolist() == pytest.approx([round(300 / step), 448 / step])
    assert rounded[1, 1] == (448 if cache == "fp8" else 1000)
    assert set(ROUNDINGS) == set(MEASURED_CACHES)


def test_a_cache_is_not_simulated_where_its_rounding_would_be_left_out():
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="--kv fp8"), rounded_cache(model, "fp8"):
        pass


@needs_avx512
def test_formats_that_do_not_fit_the_model_are_left_out_unless_they_were_named(
    tmp_path, monkeypatch, capsys
):
    """SmolLM2-135M's width: 576 is no multiple of 128."""
    save_tiny(tmp_path / "model", family="llama", hidden_size=576, head_dim=64)
    (tmp_path / "questions.txt").write_text("ab\ncd\nef\ngh\n")
    asked = without_engines(monkeypatch)
    monkeypatch.chdir(tmp_path)
    command = ["mismatch", "model", "--questions", "questions.txt", "--max-tokens", "4"]
    assert cli.main([*command, "--output", "out.json"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert asked == [("none", 16, None), ("int8", 16, None)]
    assert "compiling" not in printed
    assert "W4A16 is left out: w4a16 cannot quantize 10 of the 14 layers" in printed
    assert cli.main([*command, "--scheme", "int8,w4a16"]) == 2
    assert "w4a16 cannot quantize 10 of the 14 layers" in capsys.readouterr().err
    asked.clear()
    mixed = {"re:.*down_proj": "none", "*": "int8"}
    command += ["--scheme", json.dumps(mixed), "--output", "mixed.json"]
    assert cli.main([*command, "--engine-kwargs", '{"enforce_eager": false}']) == 0
    assert "compiling" in capsys.readouterr().out
    assert asked == [("none", 16, None), (mixed, 16, None)]


@pytest.fixture(scope="module")
def measured(warm_python, tmp_path_factory):
    """A model with outliers, what the command says about it in INT8, and what it wrote."""
    directory = tmp_path_factory.mktemp("mismatch")
    save_tiny(directory / "model", model=with_outliers(tiny_model("llama"), 0))
    # those of the scenario
    (directory / "questions.txt").write_text("ab\ncde\nf g\nh1\ni22\njj\nk\nlm\n")
    command = (
        "-m trl_qurl mismatch model --scheme int8 --questions questions.txt --samples 8 "
        f"--max-tokens 32 --no-smooth --kl {BUDGET} --kv fp8 -o new/out.json"
    )
    cache = directory / "cache"
    variables = {"TRL_QURL_CACHE": str(cache), "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    done = completed(warm_python, *command.split(), cwd=directory, **variables)
    left = list(cache.glob("*int8*"))
    assert not left, "checkpoints that nobody starts from again stay on disk"
    return directory, done.stdout, json.loads((directory / "new" / "out.json").read_text())


@pytest.mark.vllm
@pytest.mark.xdist_group("mismatch")
@needs_vnni
def test_the_command_says_what_rounding_does(measured):
    _, printed, written = measured
    assert "INT8: safe to train with" in printed
    assert "INT8, 2 finer" in printed
    assert list(written["formats"]) == ["none", "int8", "int8, 2 finer"]
    exact, plain, finer = (found["kl_k3"] for found in written["formats"].values())
    assert exact["high"] < finer["low"], "rounding is more than kernels do"
    assert finer["value"] <= BUDGET < plain["low"], "an engine with the layers is within the budget"


@pytest.mark.vllm
@pytest.mark.xdist_group("mismatch")
@needs_vnni
def test_a_cache_that_the_engine_has_is_measured_with_it(measured):
    _, printed, written = measured
    cache = written["caches"]["fp8"]["kl_k3"]
    weights = min(written["formats"][name]["kl_k3"]["value"] for name in ("int8", "int8, 2 finer"))
    assert written["formats"]["none"]["kl_k3"]["high"] < cache["low"], "a cache of 16 bits"
    advice = "leave kv_cache_dtype out" if cache["value"] > weights else "fine beside the weights"
    assert f"Cache fp8: {advice}" in " ".join(printed.split())


@pytest.mark.vllm
@pytest.mark.xdist_group("mismatch")
@needs_vnni
def test_the_list_is_one_for_training(measured):
    directory, printed, written = measured
    formats = {f"model.layers.0.mlp.{name}_proj": "none" for name in ("gate", "up")} | {"*": "int8"}
    assert written["choice"]["formats"] == formats
    path = directory / "new" / "out.yaml"
    assert path.read_text() in printed
    given = ["--config", str(path), "--output_dir", str(directory), "--report_to", "none"]
    config = parse("grpo", [*given, "--use_cpu", "--bf16", "false"])[1]
    assert config.rollout_quantization == formats
    assert config.quantization_ignore == ["lm_head"]


@pytest.mark.vllm
@pytest.mark.xdist_group("mismatch")
@needs_vnni
def test_the_kl_is_that_of_a_training_runs_first_rollout(measured, train, tmp_path):
    """Without smoothing, and with it: both fit it to the prompts, though not to the same ones."""
    directory, _, written = measured
    config = {"max_steps": 1, "per_device_train_batch_size": 64, "num_generations": 8}
    config["max_completion_length"] = 32
    runs = []
    for smooths in (False, None):
        settings = json.dumps(config | {"smooth_activations": smooths})
        runs.append([tmp_path, "--model", directory / "model", "--config", settings])
    first, smoothed = (
        next(row["mismatch/kl_k3"] for row in record["history"] if "mismatch/kl_k3" in row)
        for record in train(*runs)
    )
    kl = written["formats"]["int8"]["kl_k3"]
    assert kl["low"] - kl["value"] / 3 < first < kl["high"] + kl["value"] / 3
    assert smoothed < kl["low"] / 2, "the first rollout of a run is smoothed"
