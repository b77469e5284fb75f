"""Loading questions, and the errors for mistakes in their files."""

import gzip
import json
import re
from itertools import pairwise

import pytest
import yaml
from datasets import Dataset
from tiny import SHARED

from trl_qurl.lab import data
from trl_qurl.lab.data import INSTRUCTION, describe_solutions, load_questions
from trl_qurl.lab.evaluation.tasks import are_correct
from trl_qurl.lab.grading import as_solution


def write(path, *rows):
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
        return str(path)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


def content_of(row):
    """The last message of a prompt."""
    return row["prompt"][-1]["content"]


@pytest.mark.parametrize("name", ["q.jsonl", "q.jsonl.gz", "q.parquet"])
def test_rows_become_one_user_message_and_a_text_answer(tmp_path, name):
    rows = [{"question": f"{index} + 1?", "answer": index + 1} for index in range(3)]
    path = write(tmp_path / name, *rows)
    questions = load_questions(path, limit=2)
    assert questions.column_names == ["prompt", "solution"]
    assert questions[0]["prompt"] == [{"role": "user", "content": f"0 + 1?\n\n{INSTRUCTION}"}]
    assert questions["solution"][:] == ["$1$", "$2$"], "the limit keeps the first"
    with pytest.raises(ValueError, match="limit=0"):
        load_questions(path, limit=0)


def test_a_line_says_what_cannot_be_compared_as_mathematics(tmp_path, monkeypatch):
    pytest.importorskip("math_verify")
    answers = r"12 legs|Paris|x + 1|C#|\frac{1}{3}|C#"
    rows = [{"question": "q", "answer": answer} for answer in answers.split("|")]
    path = write(tmp_path / "q.jsonl", *rows)
    solutions = load_questions(path)["solution"][:]
    counts = "5 answers are compared as mathematics, 1 as text; no form is known for "
    example = "2, such as $C#$: only the same text is right"
    assert describe_solutions(solutions) == f"{counts}{example}."
    assert describe_solutions(["$1$", "$x$"]).endswith(" 0 as text.")
    monkeypatch.setattr(data, "CHECKED", 2)
    assert describe_solutions(solutions) == f"{counts}{example} (of the first 2 formulas)."


def refused(path, **options):
    """The error for a file of questions, which names it."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load_questions(str(path), **options)
    assert str(path) in str(caught.value)
    return str(caught.value)


COMPLETE = {"question": "q", "answer": "a"}
BAD = yaml.safe_load("""
- [question, null]
- [question, "  "]
- [question, []]
- [question, .nan]
- [question, {text: q}]
- [question, [q]]
- [question, [{role: user, content: " "}]]
- [question, [{role: assistant, content: q}]]
- [answer, null]
- [answer, "  "]
- [answer, []]
- [answer, .nan]
- [answer, {text: q}]
- [answer, [{}]]
- [answer, [x, null]]""")


@pytest.mark.parametrize(("column", "value"), BAD)
def test_a_bad_question_or_answer_is_named(tmp_path, column, value):
    path = write(tmp_path / "bad.jsonl", COMPLETE, COMPLETE | {column: value})
    error = refused(path)
    forms = {"question": "messages", "answer": "a number"}
    assert f"{column} in row 2" in error
    assert forms[column] in error


def test_columns_may_have_the_usual_names_of_the_hub(tmp_path):
    row = {
        "solution": ["1", "2"],
        "problem": "p",
        "text": "t",
        "number": 3,
    }
    path = write(tmp_path / "q.jsonl", row)
    [found] = load_questions(path)
    assert content_of(found).startswith("p\n")
    assert found["solution"] == "$1, 2$"
    [found] = load_questions(path, question_column="text", answer_column="number")
    assert content_of(found).startswith("t\n")
    assert found["solution"] == "$3$"
    for option in ("question_column", "answer_column"):
        error = refused(path, **{option: "reply"})
        assert "no column reply, only solution, problem" in error
        assert f"--{option} NAME" in error


def test_a_conversation_stays_one_and_ends_with_the_instruction(tmp_path):
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "2 + 2?"}
    path = write(tmp_path / "q.jsonl", {"prompt": [system, user], "answer": "4"})
    asked = {"role": "user", "content": f"2 + 2?\n\n{INSTRUCTION}"}
    assert load_questions(path)[0]["prompt"] == [system, asked]


@pytest.mark.parametrize(
    "name",
    [
        "no.jsonl",
        "no.jsonl.gz",
        "./no",
        "a/b/no",
        "~/home.jsonl",
    ],
)
def test_a_missing_file_is_not_mistaken_for_a_hub_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "home.jsonl", COMPLETE)
    error = refused(name)
    assert "is not an existing" in error
    assert "~ is not expanded" in error


UNREADABLE = yaml.safe_load(r"""
gap.jsonl: ['{"question": "q"}\n\n{"question": \n', "as jsonl: .* line 3, column 14"]
list.json: ['[\n\n{"question": "q" "answer": "a"}]\n', "as json: .* line 3 column 18"]
texts.json: ['["q"]', "Row 1 .* not an object"]
plain.jsonl.gz: ['{"question": "q", "answer": "a"}\n', "as jsonl: "]
bytes.parquet: ['question,answer\n', "as parquet: "]
comma.csv: ['question,answer\nOne, two, three?,4\n', "Row 1 .* more cells"]
latin.csv: ['question,answer\nWo wohnst du?,Köln\n', "not in UTF-8"]
object.json: ['{\n"data": []}\n', "line 1, column 2: write a list of objects"]
excel.csv: ['question;answer\nq;a\n', "only question;answer"]
empty.jsonl: ["", "no questions"]
table.xlsx: ['question,answer\n', "not a .json, .jsonl, .csv, .parquet file"]""")


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    content, named = UNREADABLE[name]
    path = tmp_path / name
    path.write_text(content.replace(r"\n", "\n"), encoding="latin-1")
    assert re.search(named, refused(path))


def test_values_are_not_converted(tmp_path):
    """Not as `datasets` and pandas guess them: NA as nothing, texts as dates, numbers rounded."""
    (tmp_path / "q.csv").write_text("\ufeffquestion,answer,level\nq,NA,007\nq,2024-01-05,1.50\n")
    rows = load_questions(str(tmp_path / "q.csv"), keep_columns=True)
    assert rows["solution"][:] == ["$\\text{NA}$", "$\\text{2024-01-05}$"]
    assert rows["level"][:] == ["007", "1.50"]
    path = tmp_path / "Q.JSON"
    path.write_text("""
    [{"question": 1.50, "answer": "2024-01-05"},
     {"question": 1.50, "answer": 12345678901234567.5},
     {"question": 1.50, "answer": 1.50},
     {"question": 1.50, "answer": false}]""")
    rows = load_questions(str(path))
    expected = r"$\text{2024-01-05}$ $12345678901234567.5$ $1.5$ $\text{False}$"
    assert rows["solution"][:] == expected.split()
    assert content_of(rows[0]).startswith("1.50\n")


@pytest.mark.parametrize("needs_answers", [False, True])
@pytest.mark.parametrize("levels", ['"Paris" 1.50 12345678901234567.5 null -7', f"1 {10**30}"])
def test_a_column_that_mixes_types_becomes_text(tmp_path, needs_answers, levels):
    path = tmp_path / "q.jsonl"
    row = '{"question": "q", "answer": "a", "level": %s}\n'
    path.write_text("".join(row % level for level in levels.split()))
    found = load_questions(str(path), needs_answers=needs_answers, keep_columns=True)
    texts = {"null": None, '"Paris"': "Paris"}
    assert found["level"][:] == [texts.get(level, level) for level in levels.split()]


@pytest.mark.skipif(not (SHARED / "data").exists(), reason="needs ../shared/data")
def test_the_answers_of_two_benchmarks_are_graded():
    pytest.importorskip("math_verify")
    found = {"gsm8k": [], "math500": [("5", "x=5")]}  # these two are indeed equal
    for name, equal in found.items():
        with gzip.open(SHARED / "data" / name / "test.jsonl.gz", "rt", encoding="utf-8") as file:
            answers = [json.loads(line)["answer"] for line in file][:100]
        texts = [f"So it is $\\boxed{{{answer}}}$." for answer in answers]
        solutions = [as_solution(answer) for answer in answers]
        # TRL cannot read 11\sqrt2, but the same text is right.
        assert all(are_correct(texts, solutions))
        are_right = are_correct(texts[:-1], solutions[1:])
        graded_alike = []
        for pair, is_right in zip(pairwise(answers), are_right, strict=True):
            if is_right and pair[0] != pair[1]:
                graded_alike.append(pair)
        assert graded_alike == equal
