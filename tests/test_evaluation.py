"""`trl-qurl eval`: questions, confidence intervals, and answers that are kept when the process
ends.
"""

import json
import math
import os
import re
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from accelerate import Accelerator
from conftest import completed
from documents import ROOT
from support.questions import write_questions
from tiny import ENGINE, save_tiny, tiny_tokenizer

from trl_qurl import cli
from trl_qurl.lab.evaluation import callback, worker
from trl_qurl.lab.evaluation.callback import TaskEvaluationCallback, evaluate_task
from trl_qurl.lab.evaluation.results import Answers
from trl_qurl.lab.evaluation.scores import Z95, average_at_k, paired_difference
from trl_qurl.lab.evaluation.tasks import Task, encode_prompts, load_tasks
from trl_qurl.lab.evaluation.worker import Job, answer_task, start
from trl_qurl.rollout.checks import hardware
from trl_qurl.rollout.repairs import cpu_memory

# Scores
# --------------------------------------------------------------------------------------------------


def test_the_interval_is_agresti_and_coulls():
    """10 of 30 right: (10 + 2) / (30 + 4) = 12/34, and z *
    sqrt(12/34 * 22/34 / 34) to each side.
    """
    center = 12 / 34
    half = Z95 * math.sqrt(center * 22 / 34 / 34)
    found = average_at_k([[question < 10] for question in range(30)])
    assert astuple(found) == pytest.approx((1 / 3, center - half, center + half))
    assert average_at_k([[True, False], *[[True, True]] * 9]).high == 1


def test_a_difference_is_paired():
    ours = [[True], [True], [False], [True]]
    theirs = [[True], [False], [False], [True]]
    # Differences 0, 1, 0, 0. With two more questions: mean 1/6, mean square (1 + 1) / 6, variance
    # 1/3 - 1/36 = 11/36, standard error sqrt(11/36 / 6).
    half = Z95 * math.sqrt(11 / 36 / 6)
    found = paired_difference(ours, theirs)
    assert astuple(found) == pytest.approx((0.25, 1 / 6 - half, 1 / 6 + half))
    assert paired_difference([[False]], [[True]]).low == -1
    with pytest.raises(ValueError):
        paired_difference(ours[:3], theirs)


# Tasks
# --------------------------------------------------------------------------------------------------


def test_local_files_are_tasks(tmp_path):
    path = write_questions(tmp_path / "test.jsonl", "7777")
    [task, named] = load_tasks([path, f"mine={path}"], limit=3)
    assert task.name == "test"
    assert named.name == "mine"
    assert len(task.prompts) == 3
    assert task.solutions == ["$7$"] * 3
    assert named.digest == task.digest != load_tasks([path])[0].digest


NO_TASKS = """\
other=owner/absent gsm => 'gsm'.*gsm8k, math500, aime24, amc23, minerva, olympiad
other=owner/absent gsm8k/main/test:a:b:c => gsm8k, math500
other=owner/absent =gsm8k => '=gsm8k'
other=owner/absent name= => 'name='
a=owner/set a=owner/other => named a: .*name=source
 => gsm8k, math500"""


@pytest.mark.parametrize("mistake", NO_TASKS.splitlines())
def test_what_is_no_task_is_refused_before_anything_is_loaded(mistake):
    specs, named = mistake.split(" => ")
    with pytest.raises(ValueError, match=named):
        load_tasks(specs.split())


def test_other_names_are_asked_of_the_hub(monkeypatch):
    asked = []

    def load_dataset(name, config=None, split=None):
        asked.append(f"{name} {config} {split}")
        return [{"problem": "p", "final_answer": ["1", "2"]}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    *_, task = load_tasks(["gsm8k", "aime24", "short=owner/set:hard:validation"])
    assert asked == [
        "openai/gsm8k main test",
        "HuggingFaceH4/aime_2024 None train",
        "owner/set hard validation",
    ]
    assert task.solutions == ["$1, 2$"]
    assert task.prompts[0][0]["content"].startswith("p\n")


MISTAKES = """\
--scheme int4 => int4
--scheme int8,int8 => --scheme is int8,int8
--scheme fp8 => need a GPU of compute capability 8.9
--samples 4 => --temperature
--samples 0 => --samples is 0
--temperature -1 => --temperature is -1
--top-p 1.1 => --top-p is 1.1"""


@pytest.mark.parametrize("mistake", MISTAKES.splitlines())
def test_bad_arguments_are_refused_first(mistake, tmp_path, capsys, monkeypatch):
    """On an A100."""
    options, named = mistake.split(" => ")
    monkeypatch.setattr(hardware, "gpu_capability", lambda: (8, 0))
    command = f"eval absent --tasks absent/set --output-dir {tmp_path}/out {options}"
    assert cli.main(command.split()) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def answers(question, correct, tokens, finished):
    return Answers("sums", question, ["7"] * len(correct), correct, tokens, finished)


TABLE = """
                                 model

 task     format             right           difference tokens cut off
 ─────────────────────────────────────────────────────────────────────
 sums (3) BF16   50.0 [15.7, 84.3]                           4    50.0
          INT8     0.0 [0.0, 62.0] -50.0 [-82.6, +22.6]      8     0.0

%, with 95 % intervals; difference from the first format
Results: results.json"""


def test_formats_are_compared_and_those_by_pattern_have_answers_of_their_own(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRL_QURL_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    save_tiny(tmp_path / "model")
    write_questions(tmp_path / "sums.jsonl", "7")
    right = [
        answers(0, [True, False], [1, 2], [True, False]),
        answers(1, [False, False], [3, 4], [False, False]),
        answers(2, [True, True], [5, 9], [True, True]),
    ]
    wrong = [answers(question, [False], [8], [True]) for question in range(3)]
    labels = []
    names = set()

    def answer_once(job, path):
        labels.append(job.label)
        names.add(path.name)
        return wrong if job.label == "INT8" else right

    monkeypatch.setattr(worker, "answer_once", answer_once)

    def evaluate(model, formats):
        command = "eval --tasks sums.jsonl --output-dir . --max-tokens 8 --scheme"
        assert cli.main([*command.split(), formats, str(model)]) == 0
        printed = capsys.readouterr().out
        return re.sub(" +$", "", printed, flags=re.MULTILINE)

    assert TABLE in evaluate("model", "none,int8")
    evaluate("model", '{"re:.*q_proj": "none", "re:.*down_proj": "int8"}')
    evaluate("model", '{"re:.*down_proj": "int8"}')
    stored = min(path for path in tmp_path.glob("model-int8-*") if path.is_dir())
    evaluate(stored, "none")
    assert labels == ["BF16", "INT8", "INT8", "INT8", "as stored"]
    assert len(names) == 5


# The whole thing
# --------------------------------------------------------------------------------------------------


BF16_FIRST = """\
sums BF16 6
sums INT8 6 compared
more BF16 4
more INT8 4 compared"""
INT8_FIRST = """\
sums INT8 6
sums BF16 6 compared
more INT8 4
more BF16 4 compared"""


def results():
    lines = []
    for row in json.loads(Path("whole/results.json").read_text())["results"]:
        line = f"{row['task']} {row['format']} {row['questions']}"
        if row["difference"]:
            line += " compared"
        lines.append(line)
    return "\n".join(lines)


@pytest.mark.vllm
@pytest.mark.xdist_group("evaluation")
def test_two_formats_are_compared_and_not_answered_again(warm_python, tmp_path, monkeypatch):
    """On a model of random weights. Fewer tokens at a time than the prompts have together, as with
    many questions: no prompt may be read in parts on a CPU.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRL_QURL_CACHE", f"{tmp_path}/cache")
    save_tiny(tmp_path / "model", max_position_embeddings=256)
    write_questions(tmp_path / "sums.jsonl", "777777")
    write_questions(tmp_path / "more.jsonl", "7777")
    command = "eval model --tasks sums.jsonl,more.jsonl --max-tokens 48 --samples 4 --temperature 1"
    engine = json.dumps({**ENGINE, "max_num_batched_tokens": 128})
    words = [*command.split(), "--output-dir", "whole", "--engine-kwargs", engine]
    python = [warm_python, "-m", "trl_qurl", *words, "--scheme", "none,int8"]
    printed = completed(*python, COLUMNS="140", PYTHONPATH=ROOT).stdout
    assert "sums (6)" in printed
    assert results() == BF16_FIRST
    [file] = (tmp_path / "whole").glob("none-*.json")
    rows = json.loads(file.read_text())
    assert [row["question"] for row in rows] == [*range(6), *range(4)]
    texts = set()
    for row in rows:
        assert len(row["correct"]) == 4
        texts.update(row["texts"])
    assert len(texts) > 20, "samples of one question, or the questions' samples, are the same"
    answering = MagicMock(side_effect=ChildProcessError("not now"))
    monkeypatch.setattr(worker, "call_in_child", answering)
    assert cli.main([*words, "--scheme", "int8,none"]) == 0
    answering.assert_not_called()
    assert results() == INT8_FIRST
    for changed in ("--top-p 0.5", '--chat-template-kwargs {"enable_thinking":false}'):
        assert cli.main([*words, *changed.split()]) == 2
    write_questions(tmp_path / "sums.jsonl", "888888")
    assert cli.main(words) == 2
    asked = [call.args[1].label for call in answering.call_args_list]
    assert asked == ["BF16"] * 3, "other settings or questions are answered anew"


@pytest.fixture
def started(monkeypatch):
    """Arguments of engines, none of which starts."""
    arguments = []
    monkeypatch.setattr("vllm.LLM", lambda **given: arguments.append(given))
    monkeypatch.setenv("KERNELS_OF", "none")
    monkeypatch.setattr(
        hardware, "kernel_environment", lambda *schemes: {"KERNELS_OF": f"{len(schemes)} formats"}
    )
    return arguments


def job_of(directory, answers="7", **settings):
    tasks = load_tasks([write_questions(directory / "sums.jsonl", answers)])
    prompts = [[[1] * 20] * len(answers)]
    sampling = {"max_tokens": 8, "n": 1}
    return Job("INT8", str(directory), "int8", tasks, prompts, 28, sampling, **settings)


def test_an_engine_takes_memory_that_is_free_on_a_cpu_and_compiles_on_a_gpu(
    tmp_path, monkeypatch, capsys, started
):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(cpu_memory, "free_memory", lambda: 12 * 10**9)
    save_tiny(tmp_path)
    for own in ({}, {"gpu_memory_utilization": 0.4}, ENGINE | {"enforce_eager": False}):
        start(job_of(tmp_path, engine_kwargs=own))
    first, second, third = started
    # A short answer of a tiny model needs no more; what the user has chosen comes first.
    assert first["kv_cache_memory_bytes"] == cpu_memory.MIN_CACHE
    assert "kv_cache_memory_bytes" not in second
    assert third["kv_cache_memory_bytes"] == ENGINE["kv_cache_memory_bytes"]
    is_compiled = ["compiling" in line for line in capsys.readouterr().out.splitlines()]
    assert is_compiled == [False, False, True]
    assert first["seed"] == 0
    assert os.environ["KERNELS_OF"] == "1 formats"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    start(job_of(tmp_path))
    *_, on_gpu = started
    assert not on_gpu.keys() & {"enforce_eager", "enable_chunked_prefill"}
    assert "compiling" in capsys.readouterr().out


def test_prompts_are_made_with_the_arguments_for_the_chat_template(tmp_path):
    template = "{{ messages[0]['content'] }}{% if not enable_thinking %}[no]{% endif %}"
    model = str(save_tiny(tmp_path, template, max_position_embeddings=256))
    turns = [{"role": "user", "content": "1 + 1?"}]
    [tokens], _ = encode_prompts(model, [turns], 8, enable_thinking=False)
    assert tiny_tokenizer().decode(tokens).replace(" ", "").endswith("[no]")


def test_words_and_numbers_are_graded(tmp_path, capsys):
    outputs = []
    for text in ("\\boxed{paris}", "\\boxed{5}"):
        completion = SimpleNamespace(token_ids=[1], finish_reason="stop", text=text)
        outputs.append(SimpleNamespace(outputs=[completion]))
    llm = MagicMock()
    llm.generate.return_value = outputs
    job = job_of(tmp_path, ["Paris", "4"])
    found = list(answer_task(llm, job.tasks[0], [[1], [1]], job))
    assert [row.correct for row in found] == [[True], [False]]
    _, params = llm.generate.call_args.args
    assert len({param.seed for param in params}) == 2
    assert "INT8: sums, 2 questions" in capsys.readouterr().out


def test_answers_must_fit_into_the_context(tmp_path, capsys):
    model = str(save_tiny(tmp_path / "model"))  # one token per character, and a context of 128
    questions = write_questions(tmp_path / "sums.jsonl", "7")
    out = tmp_path / "out"
    command = f"eval {model} --tasks {questions} --scheme int8 --output-dir {out}"
    assert cli.main(command.split()) == 2
    said = capsys.readouterr()
    assert "sums: 1 answers are compared as mathematics" in said.out, "before the engine starts"
    assert "--max-tokens 2048 do not fit" in said.err
    assert not out.exists(), "found before the model is quantized"
    assert encode_prompts(model, ["a" * 10, "b" * 30], 98)[1] == 128
    with pytest.raises(ValueError, match="at most --max-tokens 98"):
        encode_prompts(model, ["a" * 10, "b" * 30], 99)


def test_a_callback_counts_tokens_and_ends(monkeypatch):
    made = [[9, 1], [1, 9], [], [9]]
    monkeypatch.setattr(callback, "complete_greedily", lambda *given: made)
    tokenizer = tiny_tokenizer()
    trainer = SimpleNamespace(
        accelerator=Accelerator(cpu=True),
        _tokenizer=tokenizer,
        processing_class=tokenizer,
        eos_token_ids=[1],
        chat_template_kwargs={},
        vllm_generation=None,
    )
    found = evaluate_task(trainer, Task("sums", ["1"] * 4, ["$1$"] * 4))
    assert [*found.values()] == [0.0, 1.25, 0.25]


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"every": 0}, "every is 0"), ({"limit": 0}, "limit=0"), ({"tasks": "gsm9k"}, "'gsm9k'")],
)
def test_a_callback_with_bad_settings_is_refused(settings, named, tmp_path):
    fitting = {"tasks": write_questions(tmp_path / "sums.jsonl", "77"), "every": 1}
    assert TaskEvaluationCallback(**fitting)
    with pytest.raises(ValueError, match=named):
        TaskEvaluationCallback(**fitting | settings)
