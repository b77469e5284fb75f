"""Evaluation: which questions, which figures, and answers that survive whatever happens to the process."""

import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import child_environment, group_members
from hypothesis import given
from hypothesis import strategies as st
from tiny import ENGINE, tiny_model, tiny_tokenizer

from trl_qurl.lab.evaluation import run as evaluation_run
from trl_qurl.lab.evaluation.answers import GREEDY, SAMPLED, Answer, AnswerFile, Request, correct_by_question
from trl_qurl.lab.evaluation.callback import TaskEvaluationCallback
from trl_qurl.lab.evaluation.job import Job, Sampling
from trl_qurl.lab.evaluation.results import build_table, count, summarize
from trl_qurl.lab.evaluation.run import evaluate, keep_settings, only_process
from trl_qurl.lab.evaluation.scores import Z95, average_at_k, paired_difference, pass_at_k
from trl_qurl.lab.evaluation.tasks import SOURCES, load_task, load_tasks, needed_context
from trl_qurl.lab.evaluation.worker import sampling_params, start_engine
from trl_qurl.rollout.engine import cpu_memory

answer_sheets = st.integers(1, 5).flatmap(
    lambda k: st.lists(st.lists(st.booleans(), min_size=k, max_size=k), min_size=1, max_size=8)
)


# Scores --------------------------------------------------------------------------------------------------------------


@given(answer_sheets)
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_answer(sheet):
    for k in range(1, len(sheet[0]) + 1):
        draws = [list(itertools.combinations(answers, k)) for answers in sheet]
        expected = statistics.fmean(statistics.fmean(any(draw) for draw in of_one) for of_one in draws)
        assert pass_at_k(sheet, k) == pytest.approx(expected)
    with pytest.raises(ValueError, match="needs at least"):
        pass_at_k(sheet, len(sheet[0]) + 1)


@given(answer_sheets)
def test_the_average_is_a_count_within_its_interval(sheet):
    estimate = average_at_k(sheet)
    assert estimate.value == pytest.approx(sum(map(sum, sheet)) / sum(map(len, sheet)))
    assert 0 <= estimate.low <= estimate.value + 1e-12 and estimate.value - 1e-12 <= estimate.high <= 1
    assert estimate.high > estimate.low, "no number of answers makes an interval of nothing"


@pytest.mark.parametrize("right", [0, 1, 7, 15, 30])
def test_greedy_intervals_are_wilsons(right):
    """The ends are the shares p that lie z standard deviations of their own away: (p - x)^2 = z^2 p (1 - p) / n."""
    count_, share = 30, right / 30
    estimate = average_at_k([[question < right] for question in range(count_)])
    for end in (estimate.low, estimate.high):
        assert (end - share) ** 2 == pytest.approx(Z95**2 * end * (1 - end) / count_, abs=1e-12)
    assert (estimate.low < share or share == 0) and (estimate.high > share or share == 1)


def test_intervals_hold_what_they_promise():
    """Questions of very different difficulty, eight answers to each: 95 of 100 intervals hold the true mean."""
    generator = random.Random(0)
    covered = 0
    for _ in range(400):
        difficulties = [generator.random() ** 2 for _ in range(40)]  # mean 1/3 over all questions there could be
        sheet = [[generator.random() < p for _ in range(8)] for p in difficulties]
        estimate = average_at_k(sheet)
        covered += estimate.low <= 1 / 3 <= estimate.high
    # Twice the standard error of a share of .95 among 400 is .022.
    assert covered / 400 == pytest.approx(0.95, abs=0.03)


def test_more_answers_to_one_question_do_not_make_more_questions():
    alike = [[True] * 32, [False] * 32, [True] * 32]
    single = average_at_k([[True], [False], [True]])
    assert (average_at_k(alike).low, average_at_k(alike).high) == pytest.approx((single.low, single.high))
    mixed = average_at_k([[True, False] * 16] * 3)
    assert mixed.high - mixed.low < average_at_k(alike).high - average_at_k(alike).low


def test_a_difference_is_paired():
    ours, theirs = [[True], [True], [False], [True]], [[True], [False], [False], [True]]
    # Differences 0, 1, 0, 0. With two more questions: mean 1/6, mean square (1 + 1) / 6, variance 1/3 - 1/36 = 11/36,
    # standard error sqrt(11/36 / 6).
    estimate = paired_difference(ours, theirs)
    half = Z95 * math.sqrt(11 / 36 / 6)
    assert estimate.value == 0.25
    assert (estimate.low, estimate.high) == pytest.approx((1 / 6 - half, 1 / 6 + half))
    mirrored = paired_difference(theirs, ours)
    assert (mirrored.value, mirrored.low, mirrored.high) == (-0.25, -estimate.high, -estimate.low)
    nothing = paired_difference(ours, ours)
    assert nothing.value == 0 and nothing.low < 0 < nothing.high, "four questions prove no two models equal"
    with pytest.raises(ValueError, match="3 questions with 4"):
        paired_difference(ours[:3], theirs)


def test_differences_cover_the_truth():
    """Two models of which one solves what the other does, and a tenth of all questions besides."""
    generator = random.Random(1)
    covered = 0
    for _ in range(1500):
        draws = [generator.random() for _ in range(60)]
        estimate = paired_difference([[u < 0.6] for u in draws], [[u < 0.5] for u in draws])
        covered += estimate.low <= 0.1 <= estimate.high
    assert covered / 1500 == pytest.approx(0.95, abs=0.03)


@pytest.mark.parametrize("sheet", [[], [[]], [[True], []]])
def test_nothing_to_count_is_refused(sheet):
    with pytest.raises(ValueError, match="Answers are missing"):
        average_at_k(sheet)


# Tasks ---------------------------------------------------------------------------------------------------------------


def write_questions(path, count_=4, answer="7"):
    path.parent.mkdir(exist_ok=True)
    rows = [{"question": f"What is {number} + 1?", "answer": answer} for number in range(count_)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_local_files_are_tasks(tmp_path):
    path = write_questions(tmp_path / "sums" / "test.jsonl")
    task = load_task(path, limit=3)
    assert (task.name, len(task.prompts), task.answers) == ("sums", 3, ["7", "7", "7"])
    assert load_task(f"mine={path}").name == "mine"
    assert load_task(path).digest != task.digest and load_task(path, limit=3).digest == task.digest


@pytest.mark.parametrize("spec", ["gsm", "gsm8k/main/test:a:b:c", "=gsm8k", "name=", "name=gsm"])
def test_unknown_tasks_name_the_known_ones(spec):
    with pytest.raises(ValueError, match="gsm8k, math500, aime24, amc23, minerva, olympiad"):
        load_task(spec)


def test_two_tasks_need_two_names(tmp_path):
    path = write_questions(tmp_path / "q.jsonl")
    with pytest.raises(ValueError, match="Several tasks are named q"):
        load_tasks([path, path])
    with pytest.raises(ValueError, match="list of tasks is empty"):
        load_tasks([])


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
    assert task.answers == ["1, 2"] and task.prompts[0][0]["content"].startswith("p\n")
    assert set(SOURCES) == {"gsm8k", "math500", "aime24", "amc23", "minerva", "olympiad"}


# Answers on disk -----------------------------------------------------------------------------------------------------


def answer(question, sample=0, correct=True, mode=SAMPLED, **changed):
    request = Request("sums", mode, question, sample)
    return Answer(**{**vars(Answer(request, correct, 10, True, 0.5, "seven\r\n\u2028 7")), **changed})


def test_answers_are_read_back_and_not_made_again(tmp_path):
    file = AnswerFile(tmp_path / "deep" / "int8.jsonl")
    for question, sample in [(1, 0), (0, 1), (0, 0)]:
        file.add(answer(question, sample, correct=sample == 0))
    again = AnswerFile(file.path)
    assert again.answers == file.answers
    wanted = [Request("sums", SAMPLED, question, sample) for question in range(2) for sample in range(2)]
    assert again.missing(wanted) == [Request("sums", SAMPLED, 1, 1)]
    assert correct_by_question(again.of("sums", SAMPLED)) == [[True, False], [True]]
    assert again.of("sums", GREEDY) == again.of("other", SAMPLED) == []


def test_a_line_that_was_cut_off_is_made_again(tmp_path):
    file = AnswerFile(tmp_path / "none.jsonl")
    file.add(answer(0))
    whole = file.path.read_bytes()
    for cut in range(1, len(whole)):
        file.path.write_bytes(whole + whole.replace(b'"question": 0', b'"question": 1')[:cut])
        again = AnswerFile(file.path)
        assert set(again.answers) == {answer(0).request}
        again.add(answer(1))
        assert len(AnswerFile(file.path).answers) == 2


def test_files_that_something_else_wrote_to_are_refused(tmp_path):
    file = AnswerFile(tmp_path / "none.jsonl")
    file.add(answer(0))
    line = file.path.read_text()
    file.path.write_text(line + line)
    with pytest.raises(ValueError, match="Line 2 .* duplicates the answer"):
        AnswerFile(file.path)
    file.path.write_text("nonsense\n" + line)
    with pytest.raises(ValueError, match="Line 1 .* is not a valid answer"):
        AnswerFile(file.path)


# Settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"samples": -1}, "samples=-1"),
        ({"greedy": False}, "requests no answers"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"max_tokens": 0}, "max_tokens=0"),
    ],
)
def test_sampling_that_makes_no_sense_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**changed)


def test_a_directory_belongs_to_one_evaluation(tmp_path):
    keep_settings({"model": "a", "tasks": {"x": "1"}}, tmp_path)
    keep_settings({"model": "a", "tasks": {"x": "1"}}, tmp_path)
    with pytest.raises(ValueError, match=r"different settings \(tasks"):
        keep_settings({"model": "a", "tasks": {"x": "2"}}, tmp_path)
    with only_process(tmp_path), pytest.raises(ValueError, match="Another evaluation"):
        subprocess_lock(tmp_path)


def subprocess_lock(directory):
    code = (
        "import sys, pathlib; from trl_qurl.lab.evaluation import run; "
        "run.only_process(pathlib.Path(sys.argv[1]), 0.1)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(directory)], capture_output=True, text=True)
    if "Another evaluation is writing" in done.stderr:
        raise ValueError("Another evaluation")


def test_formats_that_there_are_not_are_refused_first(tmp_path):
    for schemes in (["int4"], [], ["int8", "int8"]):
        with pytest.raises(ValueError, match="int8.*none|none, int8, fp8"):
            evaluate("absent", ["absent"], tmp_path, Sampling(), schemes)
    assert not list(tmp_path.iterdir())


def test_every_answer_has_a_seed_of_its_own():
    pytest.importorskip("vllm")
    requests = [Request(task, SAMPLED, q, s) for task in ("a", "b") for q in range(5) for s in range(5)]
    seeds = [sampling_params(request, Sampling(samples=5, seed=1)).seed for request in requests]
    assert len(set(seeds)) == 50
    assert seeds == [sampling_params(request, Sampling(samples=5, seed=1)).seed for request in requests]
    assert sampling_params(requests[0], Sampling(samples=5, seed=2)).seed != seeds[0]
    greedy = sampling_params(Request("a", GREEDY, 0, 0), Sampling(temperature=0.6))
    assert greedy.temperature == 0.0


# Figures -------------------------------------------------------------------------------------------------------------


def test_figures_are_counts_of_the_answers():
    answers = [
        answer(q, s, correct=(q + s) % 3 == 0, tokens=10 * q + s, finished=s > 0) for q in range(4) for s in range(2)
    ]
    mode = count(answers, None)
    # Right: (0,0), (2,1), (3,0): three of eight. Solved by two: questions 0, 2 and 3.
    assert mode.average.value == 3 / 8 and mode.pass_at == {1: 3 / 8, 2: 3 / 4}
    assert mode.tokens == sum(10 * q + s for q in range(4) for s in range(2)) / 8
    assert (mode.finished, mode.seconds) == (0.5, 4.0)
    assert mode.tokens_per_second == pytest.approx(8 * mode.tokens / 4.0)


# The whole thing -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated(warm_python, tmp_path_factory):
    """A model of random weights, questions for it, and a finished evaluation in two formats."""
    directory = tmp_path_factory.mktemp("evaluation")
    tiny_model(max_position_embeddings=256).save_pretrained(directory / "model")
    tiny_tokenizer().save_pretrained(directory / "model")
    write_questions(directory / "sums.jsonl", 6)
    write_questions(directory / "more.jsonl", 4)
    done = run_eval(warm_python, directory, "whole", "--schemes", "none,int8")
    assert done.returncode == 0, done.stderr[-4000:]
    return directory, done


def command(python, directory, name, *further):
    start = [python, "-m", "trl_qurl", "eval", str(directory / "model")]
    start += [
        "--tasks",
        f"{directory / 'sums.jsonl'},{directory / 'more.jsonl'}",
        "--samples",
        "4",
        "--max-tokens",
        "48",
    ]
    return [*start, "--engine-kwargs", json.dumps(ENGINE), "--output-dir", str(directory / name), *further]


def environment(directory):
    return child_environment(TRL_QURL_CACHE=str(directory / "cache"), COLUMNS="140")


def run_eval(python, directory, name, *further):
    start = command(python, directory, name, *further)
    return subprocess.run(start, env=environment(directory), capture_output=True, text=True, timeout=400)


@pytest.mark.vllm
@pytest.mark.xdist_group("evaluation")
def test_two_formats_side_by_side(evaluated):
    directory, done = evaluated
    content = json.loads((directory / "whole" / "results.json").read_text())
    shown = [(result["task"], result["format"], result["questions"]) for result in content["results"]]
    assert shown == [("sums", "BF16", 6), ("sums", "INT8", 6), ("more", "BF16", 4), ("more", "INT8", 4)]
    for result in content["results"]:
        file = AnswerFile(directory / "whole" / f"{'none' if result['format'] == 'BF16' else 'int8'}.jsonl")
        for mode, answers_each in ((GREEDY, 1), (SAMPLED, 4)):
            answers = file.of(result["task"], mode)
            assert len(answers) == answers_each * result["questions"]
            figures = result["modes"][mode]
            assert figures["average"]["value"] == sum(a.correct for a in answers) / len(answers)
            assert figures["tokens"] == sum(a.tokens for a in answers) / len(answers)
            assert (figures["difference"] is None) == (result["format"] == "BF16")
            assert figures["seconds"] > 0 and math.isfinite(figures["tokens_per_second"])
    texts = {answer.text for answer in AnswerFile(directory / "whole" / "none.jsonl").of("sums", SAMPLED)}
    assert len(texts) > 12, "samples of one question are the same"
    for word in ("sums", "INT8", "Avg@4", "difference", "pass@k"):
        assert word in done.stdout


def test_an_engine_ends_with_the_command_that_was_killed(tmp_path):
    os.mkfifo(tmp_path / "job")  # which the process of the engine waits for
    worker = [sys.executable, "-m", "trl_qurl.lab.evaluation.worker", str(tmp_path / "job")]
    started = subprocess.Popen([sys.executable, "-c", f"import subprocess; subprocess.run({worker})"])
    while True:
        try:
            held = os.open(tmp_path / "job", os.O_WRONLY | os.O_NONBLOCK)
            break  # it has begun to wait
        except OSError:
            assert started.poll() is None, "the process of the engine has ended"
            time.sleep(0.01)
    with os.fdopen(held, "wb"):
        [child] = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
        started.kill()
        started.wait()
        deadline = time.monotonic() + 30
        while Path(f"/proc/{child}/exe").exists():
            assert time.monotonic() < deadline, "a process outlived its command"
            time.sleep(0.01)


@pytest.mark.slow  # that answers are kept and read again is seen below, too
@pytest.mark.vllm
@pytest.mark.xdist_group("evaluation")
def test_a_killed_evaluation_goes_on(warm_python, evaluated):
    directory, _ = evaluated
    path = directory / "killed" / "none.jsonl"
    process = subprocess.Popen(
        command(warm_python, directory, "killed"),
        env=environment(directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,
    )
    deadline = time.monotonic() + 200
    while not path.exists() or not path.read_bytes().count(b"\n"):
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()[-3000:]
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)  # with its engine, which would not end with a fork
    process.wait()
    deadline = time.monotonic() + 30
    while group_members(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    kept = path.read_bytes()
    before = AnswerFile(path).answers
    assert 0 < len(before) < 50, "it was killed before the first answer, or after the last"
    assert not (directory / "killed" / "results.json").exists()
    done = run_eval(warm_python, directory, "killed")
    assert done.returncode == 0, done.stderr[-4000:]
    after, expected = AnswerFile(path).answers, AnswerFile(directory / "whole" / "none.jsonl").answers
    assert path.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1]), "an answer was made for the second time"
    assert {request: (a.text, a.correct) for request, a in after.items()} == {
        request: (a.text, a.correct) for request, a in expected.items()
    }


@pytest.mark.vllm
@pytest.mark.xdist_group("evaluation")
def test_a_finished_evaluation_starts_no_engine(evaluated, monkeypatch):
    directory, _ = evaluated
    monkeypatch.setenv("TRL_QURL_CACHE", str(directory / "cache"))
    no_processes = SimpleNamespace(run=lambda *args, **kwargs: pytest.fail("a process was started"))
    monkeypatch.setattr(evaluation_run, "subprocess", no_processes)
    tasks = [str(directory / name) for name in ("sums.jsonl", "more.jsonl")]
    before = json.loads((directory / "whole" / "results.json").read_text())["results"]
    asked = {"model": str(directory / "model"), "tasks": tasks, "output_dir": directory / "whole"}
    sampling = Sampling(samples=4, max_tokens=48)
    results = evaluate(**asked, sampling=sampling, schemes=["int8", "none"])
    # The first format is now the other one, from which differences are counted.
    assert [result.format for result in results[:2]] == ["INT8", "BF16"]
    assert vars(results[1].modes[GREEDY].average) == before[0]["modes"][GREEDY]["average"]
    assert results[0].modes[GREEDY].difference is None and results[1].modes[GREEDY].difference is not None
    with pytest.raises(ValueError, match=r"different settings \(sampling"):
        evaluate(**asked, sampling=Sampling(samples=4, max_tokens=48, seed=1))
    write_questions(directory / "sums.jsonl", 6, answer="8")
    with pytest.raises(ValueError, match=r"different settings \(tasks"):
        evaluate(**asked, sampling=sampling)


@pytest.mark.skipif(torch.cuda.is_available(), reason="only vLLM's CPU build has so few head sizes")
def test_heads_that_the_engine_has_no_kernel_for_are_named(tmp_path):
    tiny_model(hidden_size=64, head_dim=16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    task = load_task(write_questions(tmp_path / "sums.jsonl", 2))
    with pytest.raises(ValueError, match="heads of this model are 16 wide"):
        start_engine(Job("BF16", str(tmp_path), [task], Sampling(max_tokens=8), tmp_path / "answers.jsonl"), [task])


def test_answers_must_fit_into_the_context():
    config = tiny_model().config
    assert needed_context(config, [[1] * 10, [1] * 30], 98) == 128
    with pytest.raises(ValueError, match="at most --max-tokens 98"):
        needed_context(config, [[1] * 10, [1] * 30], 99)
    with pytest.raises(ValueError, match="shorter questions"):
        needed_context(config, [[1] * 128], 1)


def test_a_context_that_is_too_short_is_named(tmp_path):
    tiny_model(max_position_embeddings=256).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    task = load_task(write_questions(tmp_path / "sums.jsonl", 2))
    job = Job("BF16", str(tmp_path), [task], Sampling(max_tokens=200), tmp_path / "answers.jsonl")
    with pytest.raises(ValueError, match=r"context of 256: use at most --max-tokens \d+"):
        start_engine(job, [task])


def test_the_table_fits_what_it_shows(tmp_path):
    task = load_task(write_questions(tmp_path / "sums.jsonl", 2))
    files = {}
    for label, right in (("BF16", True), ("INT8", False)):
        files[label] = AnswerFile(tmp_path / f"{label}.jsonl")
        for question in range(2):
            files[label].add(answer(question, mode=GREEDY, correct=right))
            for sample in range(2):
                files[label].add(answer(question, sample, correct=right and sample == 0))
    results = summarize(files, [task], Sampling(samples=2))
    table = build_table(results, "some/model")
    rows = list(zip(*(list(column.cells) for column in table.columns), strict=True))
    assert [row[:3] for row in rows] == [
        ("sums (2)", "BF16", "greedy"),
        ("", "BF16", "Avg@2"),
        ("", "INT8", "greedy"),
        ("", "INT8", "Avg@2"),
    ]
    assert [row[3].split()[0] for row in rows] == ["100.0", "50.0", "0.0", "0.0"]
    assert [row[4].split()[0] for row in rows if row[4]] == ["-100.0", "-50.0"]
    assert [row[5] for row in rows] == ["", "100.0", "", "0.0"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every is 0: give a positive number of optimizer steps"),
        ({"limit": 0}, "limit=0 leaves no questions"),
        ({"who": "engine"}, "who is 'engine', but must be one of 'actor', 'policy'"),
        ({"tasks": "gsm9k"}, "Unknown task 'gsm9k'"),
    ],
)
def test_a_callback_that_cannot_work_is_refused_when_it_is_made(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        TaskEvaluationCallback(**{"tasks": write_questions(tmp_path / "sums.jsonl", 2), **settings})


def test_a_callback_without_its_trainer_says_so(tmp_path):
    callback = TaskEvaluationCallback(write_questions(tmp_path / "sums.jsonl", 2))
    with pytest.raises(RuntimeError, match=r"has no trainer: pass it in callbacks=\[\.\.\.\]"):
        callback.on_train_begin(None, None, None)


def test_evaluating_without_its_packages_says_which_extra(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r"trl-qurl\[eval\]"):
        evaluate("absent", [write_questions(Path(tmp_path) / "q.jsonl")], tmp_path / "out", Sampling())


# Memory --------------------------------------------------------------------------------------------------------------


def test_an_engine_on_a_cpu_takes_memory_that_is_free(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(cpu_memory, "cpu_memory", lambda: (24 * 10**9, 12 * 10**9))
    started = []
    monkeypatch.setattr("vllm.LLM", lambda **arguments: started.append(arguments))
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    task = load_task(write_questions(tmp_path / "q.jsonl", 1))
    for own in ({}, {"gpu_memory_utilization": 0.4}, ENGINE):
        start_engine(Job("BF16", str(tmp_path), [task], Sampling(max_tokens=8), tmp_path / "a.jsonl", own), [task])
    weights = (tmp_path / "model.safetensors").stat().st_size
    default, share, chosen = (arguments.get("kv_cache_memory_bytes") for arguments in started)
    assert default == (12 * 10**9 - weights - 2**30) // 2, "half of what is free beside weights and process"
    assert share is None and chosen == ENGINE["kv_cache_memory_bytes"], "what the user has chosen comes first"


@pytest.mark.vllm
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's share is another memory's")
def test_a_share_of_memory_that_is_not_free_is_one_line(warm_python, tmp_path):
    tiny_model(max_position_embeddings=256).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    write_questions(tmp_path / "q.jsonl", 1)
    given = ["--tasks", tmp_path / "q.jsonl", "--engine-kwargs", '{"gpu_memory_utilization": 1.0}']
    start = [warm_python, "-m", "trl_qurl", "eval", tmp_path / "model", "--max-tokens", "8", *given]
    done = subprocess.run(
        [*start, "--output-dir", tmp_path / "out"], env=environment(tmp_path), capture_output=True, text=True
    )
    why, end = [line for line in done.stderr.splitlines() if line]
    assert done.returncode == 2 and why.startswith("trl-qurl: error: Of "), done.stderr[-3000:]
    assert "gpu_memory_utilization=1.0 (on a CPU, a share of the machine's memory) requires" in why
    assert "see the output above" in end
