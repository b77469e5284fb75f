"""`trl-qurl mismatch`: what rounding does to a model, before training."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from conftest import completed, needs_avx512, needs_vnni
from documents import ROOT
from tiny import save_tiny, tiny_model, tiny_tokenizer, with_outliers

from trl_qurl import cli
from trl_qurl.lab.evaluation.scores import Estimate
from trl_qurl.lab.evaluation.tasks import encode_prompt as encode
from trl_qurl.lab.mismatch.engines import Answer, score
from trl_qurl.lab.mismatch.finer import choose_finer, within_kl
from trl_qurl.lab.mismatch.prompts import BUILT_IN, Sampling, load_prompts
from trl_qurl.lab.mismatch.report import Choice, Report, Step
from trl_qurl.lab.mismatch.statistics import Scored, half_length, measure
from trl_qurl.lab.mismatch.table import sentences
from trl_qurl.lab.recipes.arguments import parse

BUDGET = 3e-5  # nats per token, between the tiny model's KL with its outliers and without

# Figures
# --------------------------------------------------------------------------------------------------


def answers_of(sigma, count=400, length=64, seed=0, mean=None):
    """Scored answers whose log ρ are normal; without a mean, E[ρ]
    = 1 as for samples of the engine.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = sigma * torch.randn(count, length, generator=generator, dtype=torch.float64)
    log_ratios = noise + (-(sigma**2) / 2 if mean is None else mean)
    return [Scored((number,), row) for number, row in enumerate(log_ratios)]


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
    assert (found.answers, found.tokens) == (400, 400 * 64)
    assert found.ess == pytest.approx(math.exp(-0.04), abs=0.01)
    assert found.ratio_quantiles[0.5] == pytest.approx(math.exp(-0.02), abs=0.01)
    assert found.ratio_quantiles[0.99] == pytest.approx(math.exp(-0.02 + 0.2 * 2.326), rel=0.02)
    assert found.ratio_quantiles[0.999] > found.ratio_quantiles[0.99]


def test_the_interval_holds_the_truth_where_questions_differ():
    found = [measure(answers_to_questions_that_differ(seed)) for seed in range(300)]
    inside = [each.kl_k3.low <= 0.045 <= each.kl_k3.high for each in found]
    assert 0.92 <= sum(inside) / len(inside) <= 0.98


def test_a_tiny_kl_is_not_lost_in_rounding():
    """Float32's own rounding of ρ, 6e-8, is as large as this KL times a thousand: log ρ = ±1e-5."""
    found = measure([Scored((0,), torch.tensor([1e-5, -1e-5], dtype=torch.float64))]).kl_k3
    assert found.value == pytest.approx(0.5e-10, rel=1e-4)


def test_tokens_above_the_cap_are_counted():
    found = measure([Scored((0,), torch.tensor([0.0, 0.5, 0.8, -1.0], dtype=torch.float64))])
    assert found.capped_share == 0.25, "of ρ = 1, 1.6, 2.2 and 0.4, one is above C = 2"


def test_answers_of_several_lengths_count_by_their_tokens():
    short, long = torch.ones(1, dtype=torch.float64), torch.zeros(9, dtype=torch.float64)
    found = measure([Scored((0,), short), Scored((1,), long)])
    assert found.kl_k3.value == pytest.approx((math.e - 2) / 10)


def test_whole_answers_lose_their_weight_with_their_length():
    """The sum of log ρ over L tokens has the variance 0.01 L, so the effective sample size is
    exp(-0.01 L).
    """
    log_ratios = [row.log_ratio for row in answers_of(0.1, count=4000)]
    assert half_length(log_ratios) == pytest.approx(math.log(2) / 0.01, rel=0.1)
    assert half_length([row + 3.0 for row in log_ratios]) == pytest.approx(
        math.log(2) / 0.01, rel=0.1
    ), "a constant"
    assert half_length([torch.zeros(4), torch.zeros(100)]) is None, "nothing differs"


def test_an_engine_that_gives_no_numbers_is_refused():
    broken = Scored((0,), torch.tensor([math.nan, 0.0], dtype=torch.float64))
    with pytest.raises(ValueError, match="not finite"):
        measure([broken])
    with pytest.raises(ValueError, match="All answers are empty"):
        measure([])


# Scores
# --------------------------------------------------------------------------------------------------


def test_answers_are_scored_as_the_model_says():
    model = tiny_model().eval()
    prompt, answer = [5, 6, 7], [8, 9, 10, 11]
    with torch.no_grad():
        logps = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    expected = [float(logps[2 + step, token]) for step, token in enumerate(answer)]
    (scored,) = score(
        model, [Answer(prompt, [], []), Answer(prompt, answer, [-1.0, -2.0, -3.0, -4.0])]
    )
    ours = [value - step - 1 for step, value in enumerate(scored.log_ratio.tolist())]
    assert ours == pytest.approx(expected, abs=1e-5)
    assert scored.question == (5, 6, 7)


# Questions
# --------------------------------------------------------------------------------------------------


def test_prompts_come_from_the_package_a_text_or_a_task(tmp_path):
    assert load_prompts(None, 3) == [[{"role": "user", "content": text}] for text in BUILT_IN[:3]]
    text = tmp_path / "mine.txt"
    text.write_text("1+1=\n\n2+2=\n3+3=\n")
    assert load_prompts(str(text), 2) == ["1+1=", "2+2="]
    rows = tmp_path / "mine.jsonl"
    rows.write_text(json.dumps({"question": "1+1?"}) + "\n")
    ((message,),) = load_prompts(str(rows), 5)  # answers are not needed
    assert message["content"].startswith("1+1?")


def test_a_plain_text_stays_as_it_is_without_a_chat_template():
    tokenizer = tiny_tokenizer()
    assert encode(tokenizer, "1+1=") == tokenizer("1+1=")["input_ids"]
    tokenizer.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert encode(tokenizer, "1+1=") == tokenizer("[1+1=]")["input_ids"]


@pytest.mark.parametrize(
    ("source", "limit", "error", "message"),
    [
        ("missing.txt", 4, FileNotFoundError, "one prompt per line"),
        ("empty.txt", 4, ValueError, "contains no prompts"),
        ("no such task", 4, ValueError, "Unknown task"),
    ],
)
def test_bad_questions_are_refused(source, limit, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(error, match=message):
        load_prompts(source, limit)


# The verdict
# --------------------------------------------------------------------------------------------------


def report_with(low, value, high):
    found = measure(answers_of(0.1, count=20))
    changed = {**found.__dict__, "kl_k3": Estimate(value, low, high)}
    return Report("MODEL", Sampling(), (), formats={"int8": type(found)(**changed)})


@pytest.mark.parametrize(
    ("kl", "words"),
    [
        ((0.0005, 0.001, 0.0049), "safe to train with: a KL of 0.001 did no harm"),
        ((0.0005, 0.001, 0.0051), "needs a correction: at a KL of 0.001"),
        ((0.019, 0.03, 0.04), "needs a correction: at a KL of 0.03"),
        ((0.021, 0.03, 0.04), "risky: with a KL of 0.03 some runs"),
    ],
)
def test_the_verdict_waits_until_the_interval_is_clear(kl, words):
    line, _ = sentences(report_with(*kl))
    assert line.startswith(f"INT8: {words}")


def test_a_list_that_misses_its_budget_is_not_passed_off_as_one_that_does():
    report = report_with(0.0005, 0.001, 0.0015)
    for limit, words in ((0.0009, "above --kl 0.0009: lower --kl"), (0.0011, "current weights")):
        choice = Choice("int8", {"*": "int8"}, 0, (), limit)
        assert words in sentences(replace(report, choice=choice))[1]


# Where it comes from
# -------------------------------------------------------------------------------------------------


STEPS = [
    Step((str(size),), "none", kl, size)
    for size, kl in ((10, 5.0), (70, 30.0), (20, 4.0), (5, 1.0))
]


def test_a_kl_is_reached_with_the_fewest_groups():
    assert within_kl(STEPS, 40.0) == []
    assert within_kl(STEPS, 39.0) == STEPS[:1]
    assert within_kl(STEPS, 5.0) == STEPS[:2]
    assert within_kl(STEPS, 0.0) == STEPS


@pytest.mark.parametrize(
    ("reached", "kept"),
    [((0.0015,), [1]), ((0.0025, 0.0015), [1, 2]), ((0.0025, 0.0025, 0.0025), [1, 2, 3])],
)
def test_lists_grow_until_an_engine_is_within_the_budget(reached, kept, monkeypatch):
    """Of a KL of 0.005, a 16-bit engine has 0.0005; the first step is all that the estimates ask
    for.
    """
    steps = [
        Step((str(size),), "none", kl, 100)
        for size, kl in ((1, 7.0), (2, 1.0), (3, 0.7), (4, 0.5), (5, 0.3))
    ]
    asked, figures = [], iter(reached)

    class FakeEngines:
        say = staticmethod(print)
        policy, prompts = None, []

        def measure(self, formats):
            asked.append(len(formats) - 1)
            return report_with(0, next(figures), 1).formats["int8"]

        def weights(self, scheme):
            return nullcontext()

    monkeypatch.setattr("trl_qurl.lab.mismatch.finer.find_steps", lambda *given: steps)
    report = report_with(0.004, 0.005, 0.006)
    report.formats["none"] = report_with(0, 0.0005, 1).formats["int8"]
    choice, mismatch = choose_finer(FakeEngines(), "int8", report, 0.002)
    assert asked == kept and mismatch.kl_k3.value == reached[-1]
    assert choice.formats == {
        **{str(1 + number): "none" for number in range(kept[-1])},
        "*": "int8",
    }


# The command
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "int9"], "int9"),
        (["--limit", "0"], "limit is 0"),
        (["--samples", "0"], "samples is 0"),
        (["--max-tokens", "4000"], "do not fit into the model's context of 128"),
        (["--questions", "nowhere.txt"], "nowhere.txt does not exist"),
        (["--output", "figures.png"], "--output is figures.png: give the name of a .json file"),
        (["--kl", "0", "--scheme", "int8"], "--kl is 0: give a positive number"),
        (["--kl", "1e-3", "--scheme", "int8,fp8"], "exactly one format, but got int8, fp8"),
        (
            ["--kl", "1e-3", "--scheme", '{"*": "int8"}'],
            'exactly one format, but got {"*": "int8"}',
        ),
        (["--scheme", "none"], "--scheme is none, but 16 bits are always measured: name a format"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(arguments, message, tmp_path, capsys):
    save_tiny(tmp_path)
    assert cli.main(["mismatch", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


@needs_avx512
def test_formats_that_do_not_fit_the_model_are_left_out_unless_they_were_named(
    tmp_path, monkeypatch, capsys
):
    """SmolLM2-135M's width: 576 is no multiple of 128."""
    save_tiny(tmp_path / "model", family="llama", hidden_size=576, head_dim=64)
    (tmp_path / "questions.txt").write_text("ab\ncd\nef\ngh\n")
    asked = []

    def answer(engine, prompts, failure):
        asked.append(engine.args[0])
        return [Answer(prompt, [8, 9, 10], [-4.0, -5.0, -4.5]) for prompt in prompts]

    monkeypatch.setattr("trl_qurl.lab.mismatch.engines.call_in_child", answer)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    command = ["mismatch", "model", "--questions", "questions.txt", "--max-tokens", "4"]
    assert cli.main([*command, "--output", "out.json"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert asked == ["none", "int8"] and "Sampling 16 answers from 16 bits Sampling" in printed
    assert (
        "W4A16 is left out: w4a16 cannot quantize 10 of the 14 layers, first model.layers.0."
        in printed
    )
    assert cli.main([*command, "--scheme", "int8,w4a16"]) == 2
    assert "w4a16 cannot quantize 10 of the 14 layers" in capsys.readouterr().err
    mixed = {"re:.*down_proj": "none", "*": "int8"}
    command += ["--scheme", json.dumps(mixed), "--output", "mixed.json"]
    assert cli.main([*command, "--engine-kwargs", '{"enforce_eager": false}']) == 0
    assert "from 16 bits, compiling: about a minute, once Sampling" in " ".join(
        capsys.readouterr().out.split()
    )
    assert asked == ["none", "int8", "none", mixed]


@pytest.fixture(scope="module")
def measured(warm_python, tmp_path_factory):
    """A model with outliers, what the command says about it in INT8, and what it wrote."""
    directory = tmp_path_factory.mktemp("mismatch")
    save_tiny(directory / "model", model=with_outliers(tiny_model("llama"), 0))
    # those of the scenario
    (directory / "questions.txt").write_text("ab\ncde\nf g\nh1\ni22\njj\nk\nlm\n")
    command = (
        "-m trl_qurl mismatch model --scheme int8 --questions questions.txt --samples 8 "
        "--max-tokens 32"
    )
    command += f" --no-smooth --kl {BUDGET} -o new/out.json"
    variables = {
        "TRL_QURL_CACHE": str(directory / "cache"),
        "COLUMNS": "80",
        "PYTHONPATH": str(ROOT),
    }
    done = completed(warm_python, *command.split(), cwd=directory, **variables)
    assert not list((directory / "cache").glob("*int8*")), (
        "checkpoints that nobody starts from again stay on disk"
    )
    return directory, done.stdout, json.loads((directory / "new" / "out.json").read_text())


@pytest.mark.vllm
@pytest.mark.xdist_group("mismatch")
@needs_vnni
def test_the_command_says_what_rounding_does(measured):
    directory, printed, written = measured
    assert "INT8: safe to train with" in printed and "INT8, 2 finer" in printed
    assert max(len(line) for line in printed.splitlines() if "/" not in line) <= 80
    assert list(written["formats"]) == ["none", "int8", "int8, 2 finer"]
    exact, plain, finer = (found["kl_k3"] for found in written["formats"].values())
    assert exact["high"] < finer["low"], "rounding is more than kernels do"
    assert finer["value"] <= BUDGET < plain["low"], (
        "an engine with the layers in 16 bits is within the budget"
    )


@pytest.mark.vllm
@pytest.mark.xdist_group("mismatch")
@needs_vnni
def test_the_list_is_one_for_training(measured):
    directory, printed, written = measured
    formats = {f"model.layers.0.mlp.{name}_proj": "none" for name in ("gate", "up")} | {"*": "int8"}
    assert written["choice"]["formats"] == formats
    assert (directory / "new" / "out.yaml").read_text() in printed
    given = ["--config", str(directory / "new" / "out.yaml"), "--output_dir", str(directory)]
    given += ["--use_cpu", "--bf16", "false", "--report_to", "none"]
    config = parse("grpo", given)[1]
    assert config.rollout_quantization == formats and config.quantization_ignore == ["lm_head"]


@pytest.mark.vllm
@pytest.mark.xdist_group("mismatch")
@needs_vnni
def test_the_kl_is_that_of_a_training_runs_first_rollout(measured, train, warm_python, tmp_path):
    """Without smoothing, and with it: both fit it to the prompts, though not to the same ones."""
    directory, _, written = measured
    config = {
        "max_steps": 1,
        "per_device_train_batch_size": 64,
        "num_generations": 8,
        "max_completion_length": 32,
    }
    configs = [json.dumps(config | {"smooth_activations": smooths}) for smooths in (False, None)]
    given = [[tmp_path, "--model", directory / "model", "--config", each] for each in configs]
    first, smoothed = (
        next(row["mismatch/kl_k3"] for row in record["history"] if "mismatch/kl_k3" in row)
        for record in train(*given)
    )
    kl = written["formats"]["int8"]["kl_k3"]
    assert kl["low"] - kl["value"] / 3 < first < kl["high"] + kl["value"] / 3
    assert smoothed < kl["low"] / 2, "the first rollout of a run is smoothed"
