"""`trl-qurl mismatch`: what rounding does to a model, before training."""

import json
import math
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch
from conftest import completed, needs_avx512, needs_vnni
from documents import ROOT
from support.training import rollout_rows
from tiny import save_tiny, tiny_model, with_outliers
from torch.distributions import Categorical, kl_divergence

from benchmarks.large_keys import enlarge_keys
from trl_qurl import cli
from trl_qurl.lab.evaluation.scores import Estimate
from trl_qurl.lab.mismatch import finer
from trl_qurl.lab.mismatch.engines import Answer, all_logps, score, simulate
from trl_qurl.lab.mismatch.prompts import BUILT_IN, load_prompts
from trl_qurl.lab.mismatch.report import Choice, Report, Step
from trl_qurl.lab.mismatch.run import MEASURED_CACHES
from trl_qurl.lab.mismatch.statistics import Scored, measure
from trl_qurl.lab.mismatch.table import build_layer_table, build_table, sentences
from trl_qurl.lab.recipes.arguments import parse
from trl_qurl.lab.rounded_cache import ROUNDINGS, rounded_cache
from trl_qurl.quantization import SCHEMES

BUDGET = 3e-5  # nats per token, between the tiny model's KL with its outliers and without

# Figures
# --------------------------------------------------------------------------------------------------


def scored(*answers):
    """Answers to different questions, given by log ρ of their tokens."""
    found = []
    for number, row in enumerate(answers):
        found.append(Scored((number,), torch.as_tensor(row, dtype=torch.float64)))
    return found


def test_the_interval_holds_the_truth_where_questions_differ():
    """In each of 300 measurements of 16 questions, of four answers each, the KL of a question is
    exponential with a mean of .045, and the scatter of log ρ with it.
    """
    inside = 0
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        kls = 0.045 * torch.empty(16, 1, 1).exponential_(generator=generator).double()
        noise = torch.randn(16, 4, 16, generator=generator, dtype=torch.float64)
        log_ratios = (2 * kls).sqrt() * noise - kls
        answers = []
        for number, row in enumerate(log_ratios.flatten(0, 1)):
            answers.append(Scored((number // 4,), row))
        found = measure(answers).kl_k3
        inside += found.low <= 0.045 <= found.high
    assert 0.92 <= inside / 300 <= 0.98


def test_a_kl_worked_out_by_hand():
    # Float32's own rounding of ρ, 6e-8, is as large as this KL times a thousand.
    found = measure(scored([1e-5, -1e-5]))
    assert found.kl_k3.value == pytest.approx(0.5e-10, rel=1e-4)
    # Answers count by their tokens.
    found = measure(scored([1.0], [0.0] * 9))
    assert found.kl_k3.value == pytest.approx((math.e - 2) / 10, rel=1e-4)


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
    rows.write_text('{"question": "1+1?"}\n')
    [[message]] = load_prompts(str(rows), 5)  # answers are not needed
    assert message["content"].startswith("1+1?")


# What is said
# --------------------------------------------------------------------------------------------------


def mismatch_of(low, value, high):
    """With ρ = 1, 1.6, 2.2 and 0.4: a quarter is above the cap."""
    return replace(measure(scored([0.0, 0.5, 0.8, -1.0])), kl_k3=Estimate(value, low, high))


REPORT = """\
                          MODEL: 1 answers of 4 tokens

 format                                     KL kernels ρ 0.1-99.9 %  ρ > C   ESS
 ───────────────────────────────────────────────────────────────────────────────
 16 bits                             0.1 ± 0.1       -    0.37-2.22 25.00% 78.0%
 INT8                                  1 ± 2.2     10%    0.37-2.22 25.00% 78.0%
 INT8, 3 finer                         3 ± 2.3      3%    0.37-2.22 25.00% 78.0%
 FP8                                   30 ± 10      0%    0.37-2.22 25.00% 78.0%
 W4A16                               300 ± 190      0%    0.37-2.22 25.00% 78.0%
 cache fp8                             8 ± 7.6       -    0.37-2.22 25.00% 78.0%
 cache int8_per_token_head           0.1 ± 0.3       -    0.37-2.22 25.00% 78.0%
 cache fp8_per_token_head, simulated   2 ± 500       -    0.37-2.22 25.00% 78.0%

KL in 1e-3 nats per token (k3; exact if simulated) with 95 % intervals; ρ: policy
over engine; C = 2; kernels: share of the KL that a 16-bit engine has, too; ESS:
effective sample size of tokens.
 Sources of the KL: the first 2 of 2

 layers           finer   KL MB taken
 ────────────────────────────────────
 up and 1 fused   W8A16  250  2   yes
 down           16 bits 0.01  6

Estimated KL that a finer format
removes, in 1e-3 nats per token; most
KL per byte first. Those taken add 2
MB, 25.0% of what quantization saves.
INT8: safe to train with: a KL of 0.001 did no harm in our study. Keep the defaults.
INT8, 3 finer: keep the correction (objective='acr' or 'tis'): a KL of 0.003 is no reason to change
the format. Watch mismatch/kl_k3.
FP8: keep the correction (objective='acr' or 'tis'): a KL of 0.03 is no reason to change the format.
Watch mismatch/kl_k3.
W4A16: risky: with a KL of 0.3 single runs of our study ended low, even with a correction. Choose a
finer format, keep sensitive layers in 16 bits (quantization_ignore), or leave smooth_activations on
(INT8).
Cache fp8: its KL of 0.008 is above that of INT8 weights, 0.001: leave kv_cache_dtype out.
Cache int8_per_token_head: its KL of 0.0001 is below that of INT8 weights, 0.001: fine beside them.
Cache fp8_per_token_head, simulated: its KL of 0.002 is not clearly above or below that of INT8
weights, 0.001: leave kv_cache_dtype out, or measure with more prompts.
The prompts have 2000 tokens on average. Errors of a cache grow with the context: ask with prompts
as long as your answers become.
INT8, 3 finer has a KL of 0.003, above --kl 0.0029: lower --kl.
These results are for the current weights. Training can increase the mismatch: watch mismatch/kl_k3,
and if it grows, lower the learning rate or choose finer formats for sensitive layers."""


def test_what_is_said(capsys):
    """Verdicts wait until the interval is clear; a cache is recommended only below the finest
    weights; a list that misses its budget is not passed off as one that does.
    """
    console = pytest.importorskip("rich.console").Console(width=100)
    formats = {
        "none": (0, 0.0001, 0.0002),
        "int8": (0.0005, 0.001, 0.0049),
        "int8, 3 finer": (0.0005, 0.003, 0.0051),
        "fp8": (0.019, 0.03, 0.04),
        "w4a16": (0.021, 0.3, 0.4),
    }
    report = Report("MODEL", {"prompt_tokens": 2000.4})
    report.formats = {name: mismatch_of(*kl) for name, kl in formats.items()}
    report.caches = {
        "fp8": mismatch_of(0.0048, 0.008, 0.02),  # overlaps INT8's, but their difference is clear
        "int8_per_token_head": mismatch_of(0, 0.0001, 0.0006),
        "fp8_per_token_head, simulated": mismatch_of(0, 0.002, 1),
    }
    finer_up = Step(("up", "gate"), "w8a16", 0.25, 2_000_000)
    steps = (finer_up, Step(("down",), "none", 1e-5, 6_000_000))
    report.choice = Choice("int8, 3 finer", {"up": "w8a16", "*": "int8"}, 1, steps, 0.0029)
    console.print(build_table(report), build_layer_table(report.choice))
    console.print(*sentences(report), sep="\n")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "\n".join(lines) == REPORT
    report.choice = replace(report.choice, limit=0.0031)
    report.formats["int8"] = mismatch_of(0, 0, 0)  # one answer has no interval
    report.caches = {"fp8": mismatch_of(1, 1, 1)}
    said = "".join(sentences(report))
    assert "--kl" not in said
    assert "not clearly" in said


# Where it comes from
# -------------------------------------------------------------------------------------------------


@pytest.fixture
def choose(monkeypatch):
    """Choose for a KL; an engine with no finer layers has 0.005, and a 16-bit one 0.0005. Returns
    how many layers were finer in each engine.
    """
    kls = (7.0, 0.7, 1.0, 0.5, 0.3)
    steps = [Step((str(number),), "none", kl, 100) for number, kl in enumerate(kls)]
    find_steps = MagicMock(return_value=steps)
    monkeypatch.setattr(finer, "available_formats", lambda: ["int8", "w8a16"])
    monkeypatch.setattr(finer, "find_steps", find_steps)
    formats = {"none": mismatch_of(0, 0.0005, 1), "int8": mismatch_of(0.004, 0.005, 0.006)}

    def choose(limit, *reached):
        find_steps.reset_mock()
        engines = MagicMock()
        engines.measure.side_effect = [mismatch_of(0, kl, 1) for kl in reached]
        report = Report("MODEL", {}, formats)
        choice, mismatch = finer.choose_finer(engines, "int8", report, limit)
        assert mismatch.kl_k3.value == reached[-1]
        assert find_steps.call_args.args[-1] == [SCHEMES["w8a16"]]
        asked = [len(call.args[0]) - 1 for call in engines.measure.call_args_list]
        kept = {str(number): "none" for number in range(asked[-1])}
        assert choice.formats == kept | {"*": "int8"}
        return asked

    return choose


def test_lists_grow_until_an_engine_is_within_the_budget(choose):
    """The first step is all that the estimates ask for. Two would be enough then, without a
    margin.
    """
    assert choose(0.002, 0.0025, 0.0015) == [1, 3]
    assert choose(0.002, 0.0025, 0.0025, 0.0025) == [1, 3, 4]


@pytest.mark.parametrize(
    ("limit", "named"), [(0.0005, "out of reach: .* 16-bit"), (0.00051, "all layers in 16 bits")]
)
def test_a_budget_without_room_for_rounding_is_refused(limit, named, choose):
    with pytest.raises(ValueError, match=named):
        choose(limit)


# The command
# --------------------------------------------------------------------------------------------------


MISTAKES = """\
--limit 0 => limit is 0
--max-tokens 4000 => context of 128
--questions nowhere.txt => nowhere.txt
--questions empty.txt => empty.txt
--questions nowhere.jsonl => nowhere.jsonl is not an existing
--output figures.png => --output is figures.png
--kl 0 --scheme int8 => --kl is 0
--kl 1e-3 --scheme int8,fp8 => int8, fp8
--kl 1e-3 --scheme {"*":"int8"} => {"*":"int8"}
--scheme none => --scheme is none
--kv fp8,int4 => --kv is fp8,int4
--kv fp8,fp8 => each once
--kv fp8 --engine-kwargs {"kv_cache_dtype":"fp8"} => --engine-kwargs"""


@pytest.mark.parametrize("mistake", MISTAKES.splitlines())
def test_what_cannot_be_measured_is_refused_at_once(mistake, tmp_path, monkeypatch, capsys):
    arguments, named = mistake.split(" => ")
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path)
    (tmp_path / "empty.txt").write_text("\n \n")
    assert cli.main(["mismatch", ".", *arguments.split()]) == 2
    assert named in capsys.readouterr().err


def without_engines(monkeypatch):
    """Answers come from nowhere; what was asked of each engine is returned."""
    asked = []

    def answer(engine, prompts, failure):
        formats, arguments, *_ = engine.args
        is_quantized = arguments["model"] != "model"
        assert is_quantized == (formats != "none")
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
    command += " --kv fp8,fp8_per_token_head,int8_per_token_head -o out.json"
    assert cli.main(command.split()) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert asked == [("none", 4, None), ("int8", 4, None), ("none", 4, "fp8")]
    found = json.loads((tmp_path / "out.json").read_text())["caches"]
    assert list(found) == ["fp8", "fp8_per_token_head, simulated", "int8_per_token_head, simulated"]
    _, fp8, int8 = (cache["kl_k3"]["value"] for cache in found.values())
    assert 0 < 10 * fp8 < int8, found
    assert "8 tokens on average" in printed


@pytest.mark.parametrize(("cache", "step"), [("fp8", 32), ("int8_per_token_head", 448 / 127)])
def test_how_a_cache_rounds(cache, step):
    rounded = ROUNDINGS[cache](torch.tensor([[300.0, 448.0], [5.0, 1000.0]]))
    codes = rounded[0] / step
    assert codes.tolist() == pytest.approx([round(300 / step), 448 / step])
    assert rounded[1, 1] == (448 if cache == "fp8" else 1000)
    assert ROUNDINGS.keys() == {*MEASURED_CACHES}


def test_the_kl_of_a_simulated_cache_is_exact():
    model = tiny_model(initializer_range=0.5)
    answer = Answer([5, 6, 7], [8, 9, 10], [])
    [scored] = simulate(model, [answer], "fp8")
    with rounded_cache(model, "fp8"):
        rounded = Categorical(logits=all_logps(model, answer))
    exact = Categorical(logits=all_logps(model, answer))
    found = measure([scored]).kl_k3.value
    assert found == pytest.approx(float(kl_divergence(rounded, exact).mean()), rel=1e-4)


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
    assert (tmp_path / "out.json").exists()
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
    done = completed(
        warm_python,
        *command.split(),
        cwd=directory,
        TRL_QURL_CACHE=str(cache),
        COLUMNS="80",
        PYTHONPATH=str(ROOT),
    )
    assert not [*cache.glob("*int8*")], "checkpoints that nobody starts from again stay on disk"
    return directory, done.stdout, json.loads((directory / "new" / "out.json").read_text())


@pytest.mark.vllm
@pytest.mark.xdist_group("mismatch")
@needs_vnni
def test_the_command_says_what_rounding_does_and_lists_layers_for_training(measured):
    directory, printed, written = measured
    assert "INT8, 2 finer" in printed
    assert list(written["formats"]) == ["none", "int8", "int8, 2 finer"]
    exact, plain, finer = (found["kl_k3"] for found in written["formats"].values())
    assert exact["high"] < finer["low"], "rounding is more than kernels do"
    assert finer["value"] <= BUDGET < plain["low"], "an engine with the layers is within the budget"
    cache = written["caches"]["fp8"]["kl_k3"]
    assert exact["high"] < cache["low"], "a cache of 16 bits"
    formats = {f"model.layers.0.mlp.{name}_proj": "none" for name in ("gate", "up")} | {"*": "int8"}
    assert written["choice"]["formats"] == formats
    path = directory / "new" / "out.yaml"
    assert path.read_text() in printed
    given = f"--config {path} --output_dir {directory} --report_to none --use_cpu --bf16 false"
    config = parse("grpo", given.split())[1]
    assert config.rollout_quantization == formats
    assert [*config.rollout_quantization][-1] == "*", "the first pattern that matches decides"
    assert config.quantization_ignore == ["lm_head"]


@pytest.mark.vllm
@pytest.mark.xdist_group("mismatch")
@needs_vnni
def test_the_kl_is_that_of_a_training_runs_first_rollout(measured, train, tmp_path):
    """Without smoothing, and with it: both fit it to the prompts, though not to the same ones."""
    directory, _, written = measured
    config = {
        "max_steps": 1,
        "per_device_train_batch_size": 64,
        "num_generations": 8,
        "max_completion_length": 32,
    }
    run = [tmp_path, "--model", directory / "model"]
    records = train(*([*run, config | {"smooth_activations": on}] for on in (False, None)))
    first, smoothed = (rollout_rows(record)[0]["mismatch/kl_k3"] for record in records)
    kl = written["formats"]["int8"]["kl_k3"]
    assert kl["low"] - kl["value"] / 3 < first < kl["high"] + kl["value"] / 3
    assert smoothed < kl["low"] / 2, "the first rollout of a run is smoothed"
