"""`trl-qurl eval`: questions, confidence intervals, and answers that are kept when the process
ends.
"""

import json
import math
import random
import statistics
import subprocess
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from conftest import child_environment
from hypothesis import given
from hypothesis import strategies as st
from tiny import ENGINE, save_tiny, tiny_model, tiny_tokenizer

from trl_qurl import cli
from trl_qurl.lab.evaluation import worker
from trl_qurl.lab.evaluation.callback import TaskEvaluationCallback
from trl_qurl.lab.evaluation.results import Answer, build_table, summarize
from trl_qurl.lab.evaluation.scores import Z95, average_at_k, paired_difference
from trl_qurl.lab.evaluation.tasks import SOURCES, load_task, load_tasks, needed_context
from trl_qurl.lab.evaluation.worker import Job, answer_task, start_engine
from trl_qurl.rollout.repairs import cpu_memory

answer_sheets = st.integers(1, 5).flatmap(
    lambda k: st.lists(st.lists(st.booleans(), min_size=k, max_size=k), min_size=1, max_size=8)
)


# Scores
# --------------------------------------------------------------------------------------------------


@given(answer_sheets)
def test_the_average_lies_within_its_interval(sheet):
    estimate = average_at_k(sheet)
    assert estimate.value == pytest.approx(sum(map(sum, sheet)) / sum(map(len, sheet)))
    assert (
        0 <= estimate.low <= estimate.value + 1e-12 and estimate.value - 1e-12 <= estimate.high <= 1
    )
    assert estimate.high > estimate.low, "no number of answers makes an interval of nothing"


def test_the_interval_is_agresti_and_coulls():
    """10 of 30 right: (10 + 2) / (30 + 4) = 12/34, and z *
    sqrt(12/34 * 22/34 / 34) to each side.
    """
    estimate = average_at_k([[question < 10] for question in range(30)])
    half = Z95 * math.sqrt(12 / 34 * 22 / 34 / 34)
    assert estimate.value == pytest.approx(1 / 3)
    assert (estimate.low, estimate.high) == pytest.approx((12 / 34 - half, 12 / 34 + half))
    assert average_at_k([[True]] * 30).high == 1 and average_at_k([[False]] * 30).low == 0


def test_95_percent_of_the_intervals_cover_the_truth():
    generator = random.Random(0)
    averages, differences = 0, 0
    for _ in range(400):
        difficulties = [generator.random() ** 2 for _ in range(40)]  # mean 1/3
        estimate = average_at_k([[generator.random() < p for _ in range(8)] for p in difficulties])
        averages += estimate.low <= 1 / 3 <= estimate.high
        draws = [generator.random() for _ in range(60)]
        estimate = paired_difference([[u < 0.6] for u in draws], [[u < 0.5] for u in draws])
        differences += estimate.low <= 0.1 <= estimate.high
    # Twice the standard error of a share of .95 among 400 is .022.
    assert averages / 400 == pytest.approx(0.95, abs=0.03) and differences / 400 == pytest.approx(
        0.95, abs=0.03
    )


def test_a_difference_is_paired():
    ours, theirs = [[True], [True], [False], [True]], [[True], [False], [False], [True]]
    # Differences 0, 1, 0, 0. With two more questions: mean 1/6, mean square (1 + 1) / 6, variance
    # 1/3 - 1/36 = 11/36, standard error sqrt(11/36 / 6).
    estimate = paired_difference(ours, theirs)
    half = Z95 * math.sqrt(11 / 36 / 6)
    assert estimate.value == 0.25
    assert (estimate.low, estimate.high) == pytest.approx((1 / 6 - half, 1 / 6 + half))
    mirrored = paired_difference(theirs, ours)
    assert (mirrored.value, mirrored.low, mirrored.high) == (-0.25, -estimate.high, -estimate.low)
    nothing = paired_difference(ours, ours)
    assert nothing.value == 0 and nothing.low < 0 < nothing.high, (
        "four questions prove no two models equal"
    )
    with pytest.raises(ValueError):
        paired_difference(ours[:3], theirs)


# Tasks
# --------------------------------------------------------------------------------------------------


def write_questions(path, count_=4, answer="7"):
    path.parent.mkdir(exist_ok=True)
    rows = [{"question": f"What is {number} + 1?", "answer": answer} for number in range(count_)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_local_files_are_tasks(tmp_path):
    path = write_questions(tmp_path / "sums" / "test.jsonl")
    task = load_task(path, limit=3)
    assert (task.name, len(task.prompts), task.solutions) == ("test", 3, ["$7$", "$7$", "$7$"])
    assert load_task(f"mine={path}").name == "mine"
    assert load_task(path).digest != task.digest and load_task(path, limit=3).digest == task.digest
    with pytest.raises(ValueError, match="Several tasks are named test"):
        load_tasks([path, path])
    with pytest.raises(ValueError, match="list of tasks is empty"):
        load_tasks([])


@pytest.mark.parametrize("spec", ["gsm", "gsm8k/main/test:a:b:c", "=gsm8k", "name=", "name=gsm"])
def test_unknown_tasks_name_the_known_ones(spec):
    with pytest.raises(ValueError, match="gsm8k, math500, aime24, amc23, minerva, olympiad"):
        load_task(spec)


@pytest.mark.parametrize(
    ("spec", "asked"),
    [
        ("gsm8k", ("openai/gsm8k", "main", "test")),
        ("aime24", ("HuggingFaceH4/aime_2024", None, "train")),
        ("owner/set", ("owner/set", None, "test")),
        ("short=owner/set:hard:validation", ("owner/set", "hard", "validation")),
        ("short=olympiad", ("math-ai/olympiadbench", None, "test")),
    ],
)
def test_other_names_are_asked_of_the_hub(spec, asked, monkeypatch):
    import datasets

    def load_dataset(name, config=None, split=None):
        assert (name, config, split) == asked
        return [{"problem": "p", "final_answer": ["1", "2"]}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = load_task(spec)
    assert task.solutions == ["$1, 2$"] and task.prompts[0][0]["content"].startswith("p\n")
    assert set(SOURCES) == {"gsm8k", "math500", "aime24", "amc23", "minerva", "olympiad"}


def answer(question, correct=True, **changed):
    return Answer(**{**vars(Answer("sums", question, correct, 10, True, "7")), **changed})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scheme", "int4"], "int4"),
        (["--scheme", "int8,int8"], "--scheme is int8,int8: list each format once"),
        (["--samples", "4"], "--samples 4 requires a --temperature above 0"),
    ],
)
def test_bad_arguments_are_refused_first(options, message, tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        cli.main(["eval", "absent", "--tasks", "absent/set", "--output-dir", str(out), *options])
        == 2
    )
    assert message in capsys.readouterr().err and not out.exists()


def test_formats_by_pattern_have_answers_of_their_own(tmp_path, monkeypatch, capsys):
    save_tiny(tmp_path / "model")
    write_questions(tmp_path / "sums.jsonl", 1)
    asked = []
    monkeypatch.setattr(
        worker, "answer_once", lambda job, path: asked.append((job.label, path.name)) or [answer(0)]
    )
    monkeypatch.setenv("TRL_QURL_CACHE", str(tmp_path))
    command = [
        "eval",
        str(tmp_path / "model"),
        "--tasks",
        str(tmp_path / "sums.jsonl"),
        "--output-dir",
        str(tmp_path),
    ]
    for formats in (
        "none,int8",
        '{"re:.*q_proj": "none", "re:.*down_proj": "int8"}',
        '{"re:.*down_proj": "int8"}',
    ):
        assert cli.main([*command, "--scheme", formats]) == 0, capsys.readouterr().err
    [first, *_] = sorted(path for path in tmp_path.glob("model-int8-*") if path.is_dir())
    assert (
        cli.main(["eval", str(first), *command[2:4], "--output-dir", str(tmp_path / "stored")]) == 0
    )
    labels, names = zip(*asked, strict=True)
    assert labels == ("BF16", "INT8", "INT8", "INT8", "as stored") and names[:2] == (
        "none.jsonl",
        "int8.jsonl",
    )
    assert len({*names}) == 4 and all(name.startswith("model-int8-") for name in names[2:4])


# Figures
# --------------------------------------------------------------------------------------------------


def test_figures_are_counts_of_the_answers():
    pairs = list(product(range(4), range(2)))
    answers = [
        answer(q, correct=(q + s) % 3 == 0, tokens=10 * q + s, finished=s > 0) for q, s in pairs
    ]
    wrong = [answer(q, correct=False) for q in range(4) for _ in range(2)]
    first, second = summarize({"BF16": answers, "INT8": wrong})
    # Right: (0,0), (2,1), (3,0): three of eight.
    assert (first.accuracy.value, first.questions, first.difference) == (3 / 8, 4, None)
    assert (
        first.tokens == sum(10 * q + s for q in range(4) for s in range(2)) / 8
        and first.finished == 0.5
    )
    assert second.difference.value == -3 / 8 and second.accuracy.value == 0
    table = build_table([first, second], "some/model")
    shown = list(zip(*(list(column.cells) for column in table.columns), strict=True))
    assert [row[:2] for row in shown] == [("sums (4)", "BF16"), ("", "INT8")]
    assert [row[2].split()[0] for row in shown] == ["37.5", "0.0"]
    assert shown[0][3] == "" and shown[1][3].startswith("-37.5 [")


# The whole thing
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated(warm_python, tmp_path_factory):
    """A model of random weights, questions for it, and a finished evaluation in two formats."""
    directory = tmp_path_factory.mktemp("evaluation")
    save_tiny(directory / "model", max_position_embeddings=256)
    write_questions(directory / "sums.jsonl", 6)
    write_questions(directory / "more.jsonl", 4)
    done = run_eval(
        warm_python,
        directory,
        "whole",
        "--scheme",
        "none,int8",
        "--samples",
        "4",
        "--temperature",
        "1",
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return directory, done


def command(python, directory, name, *extra):
    start = [python, "-m", "trl_qurl", "eval", str(directory / "model"), "--max-tokens", "48"]
    start += ["--tasks", f"{directory / 'sums.jsonl'},{directory / 'more.jsonl'}"]
    # Fewer tokens than the prompts have together, as with many questions: no prompt may be read in
    # parts on a CPU.
    engine = json.dumps({**ENGINE, "max_num_batched_tokens": 128})
    return [*start, "--engine-kwargs", engine, "--output-dir", str(directory / name), *extra]


def environment(directory):
    return child_environment(TRL_QURL_CACHE=str(directory / "cache"), COLUMNS="140")


def run_eval(python, directory, name, *extra):
    start = command(python, directory, name, *extra)
    return subprocess.run(
        start, env=environment(directory), capture_output=True, text=True, timeout=400
    )


@pytest.mark.vllm
@pytest.mark.xdist_group("evaluation")
def test_two_formats_side_by_side(evaluated):
    directory, done = evaluated
    content = json.loads((directory / "whole" / "results.json").read_text())
    shown = [
        (result["task"], result["format"], result["questions"]) for result in content["results"]
    ]
    assert shown == [
        ("sums", "BF16", 6),
        ("sums", "INT8", 6),
        ("more", "BF16", 4),
        ("more", "INT8", 4),
    ]
    for result in content["results"]:
        answers = read_answers(
            directory / "whole" / f"{'none' if result['format'] == 'BF16' else 'int8'}.jsonl"
        )
        answers = [answer for answer in answers if answer["task"] == result["task"]]
        assert [answer["question"] for answer in answers] == [
            q for q in range(result["questions"]) for _ in range(4)
        ]
        assert result["accuracy"]["value"] == statistics.fmean(
            answer["correct"] for answer in answers
        )
        assert result["tokens"] == statistics.fmean(answer["tokens"] for answer in answers)
        assert (result["difference"] is None) == (result["format"] == "BF16")
    texts = [answer["text"] for answer in read_answers(directory / "whole" / "none.jsonl")]
    assert len(set(texts)) > 20, "samples of one question, or the questions' samples, are the same"
    for word in ("sums (6)", "INT8", "right", "difference"):
        assert word in done.stdout


def read_answers(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.vllm
@pytest.mark.xdist_group("evaluation")
def test_finished_formats_are_not_repeated(evaluated, monkeypatch, capsys):
    """Formats with answers do not start an engine again."""
    directory, _ = evaluated
    monkeypatch.setenv("TRL_QURL_CACHE", str(directory / "cache"))
    monkeypatch.setattr(
        worker, "call_in_child", lambda *args, **kwargs: pytest.fail("a process started")
    )
    sampled = ["--samples", "4", "--temperature", "1"]
    again = command("", directory, "whole", *sampled)[3:]
    assert cli.main([*again, "--scheme", "int8,none"]) == 0
    results = json.loads((directory / "whole" / "results.json").read_text())["results"]
    # The first format is now the other one, from which differences are counted.
    assert [result["format"] for result in results[:2]] == ["INT8", "BF16"]
    assert results[0]["difference"] is None and results[1]["difference"] is not None
    assert cli.main([*again, "--seed", "1"]) == 2
    assert "different settings (sampling)" in capsys.readouterr().err
    assert cli.main([*again, *sampled, "--chat-template-kwargs", '{"enable_thinking": false}']) == 2
    assert "different settings (chat_template_kwargs)" in capsys.readouterr().err
    write_questions(directory / "sums.jsonl", 6, answer="8")
    assert cli.main(again) == 2
    assert "different settings (tasks)" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="only vLLM's CPU build has so few head sizes")
def test_heads_without_a_kernel_are_refused(tmp_path):
    save_tiny(tmp_path, hidden_size=64, head_dim=16)
    task = load_task(write_questions(tmp_path / "sums.jsonl", 2))
    with pytest.raises(ValueError, match="heads of this model are 16 wide"):
        start_engine(Job("BF16", str(tmp_path), [task], {"max_tokens": 8}, 0, {}))


def test_an_engine_on_a_gpu_compiles_by_default(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    started = []
    monkeypatch.setattr("vllm.LLM", lambda **arguments: started.append(arguments))
    save_tiny(tmp_path)
    task = load_task(write_questions(tmp_path / "q.jsonl", 1))
    start_engine(Job("BF16", str(tmp_path), [task], {"max_tokens": 8}, 0, {}))
    assert not started[0].keys() & {"enforce_eager", "enable_chunked_prefill"}
    assert capsys.readouterr().out == "Starting vLLM with BF16, compiling: about a minute, once\n"


def test_evaluation_says_how_answers_are_compared(tmp_path, monkeypatch, capsys):
    (tmp_path / "q.jsonl").write_text(
        '{"question": "q", "answer": "Paris"}\n{"question": "q", "answer": "4"}\n'
    )
    task = load_task(str(tmp_path / "q.jsonl"))
    [right, wrong] = [
        SimpleNamespace(token_ids=[1], finish_reason="stop", text=rf"\boxed{{{t}}}")
        for t in ("paris", "5")
    ]
    outputs = [SimpleNamespace(outputs=[completion]) for completion in (right, wrong)]
    llm = SimpleNamespace(generate=lambda prompts, params: outputs)
    answers = list(
        answer_task(llm, task, [[1], [1]], Job("BF16", "", [task], {"max_tokens": 8}, 0, {}))
    )
    assert [answer.correct for answer in answers] == [True, False]
    assert capsys.readouterr().out == "BF16: q, 2 questions, 1 compared as text\n"


def test_prompts_are_made_with_the_arguments_for_the_chat_template(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm.LLM", lambda **arguments: None)
    template = "{{ messages[0]['content'] }}{% if not enable_thinking %}[no]{% endif %}"
    save_tiny(tmp_path, template, max_position_embeddings=256)
    task = load_task(write_questions(tmp_path / "sums.jsonl", 1))
    job = Job(
        "BF16", str(tmp_path), [task], {"max_tokens": 8}, 0, {}, ENGINE, {"enable_thinking": False}
    )
    [tokens] = start_engine(job)[0]["sums"]
    assert tiny_tokenizer().decode(tokens).replace(" ", "").endswith("[no]")


def test_answers_must_fit_into_the_context():
    config = tiny_model().config
    assert needed_context(config, [[1] * 10, [1] * 30], 98) == 128
    with pytest.raises(ValueError, match="at most --max-tokens 98"):
        needed_context(config, [[1] * 10, [1] * 30], 99)
    with pytest.raises(ValueError, match="shorter questions"):
        needed_context(config, [[1] * 128], 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every is 0: give a positive number of optimizer steps"),
        ({"limit": 0}, "limit=0 leaves no questions"),
        ({"tasks": "gsm9k"}, "Unknown task 'gsm9k'"),
    ],
)
def test_a_callback_with_bad_settings_is_refused(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        TaskEvaluationCallback(**{"tasks": write_questions(tmp_path / "sums.jsonl", 2), **settings})


# Memory
# --------------------------------------------------------------------------------------------------


def test_an_engine_on_a_cpu_takes_memory_that_is_free(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(cpu_memory, "free_memory", lambda: 12 * 10**9)
    started = []
    monkeypatch.setattr("vllm.LLM", lambda **arguments: started.append(arguments))
    save_tiny(tmp_path)
    task = load_task(write_questions(tmp_path / "q.jsonl", 1))
    for own in ({}, {"gpu_memory_utilization": 0.4}, ENGINE | {"enforce_eager": False}):
        start_engine(Job("BF16", str(tmp_path), [task], {"max_tokens": 8}, 0, {}, own))
    default, share, chosen = (arguments.get("kv_cache_memory_bytes") for arguments in started)
    assert default == cpu_memory.MIN_CACHE, "a short answer of a tiny model needs no more"
    first, _, third = capsys.readouterr().out.splitlines()
    assert (first, third) == (
        "Starting vLLM with BF16",
        "Starting vLLM with BF16, compiling: about a minute, once",
    )
    assert share is None and chosen == ENGINE["kv_cache_memory_bytes"], (
        "what the user has chosen comes first"
    )
