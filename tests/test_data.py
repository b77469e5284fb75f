"""Loading questions: what comes out, and that every mistake in the source is named before anything slow happens."""

import gzip
import json

import pytest
from tiny import SHARED

from trl_qurl.lab.data import INSTRUCTION, as_solution, load_questions
from trl_qurl.lab.evaluation.tasks import are_correct


def write(path, rows):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


@pytest.mark.parametrize("name", ["questions.jsonl", "questions.jsonl.gz"])
def test_rows_become_one_user_message_and_a_text_answer(tmp_path, name):
    path = write(
        tmp_path / name, [{"question": "2 + 2?", "answer": 4}, {"question": "Half of 1?", "answer": "\\frac12"}]
    )
    questions = load_questions(path)
    assert questions.column_names == ["prompt", "solution"]
    assert questions[0]["prompt"] == [{"role": "user", "content": f"2 + 2?\n\n{INSTRUCTION}"}]
    assert questions["solution"][:] == ["$4$", "$\\frac12$"]


def test_a_json_file_holds_a_list(tmp_path):
    path = tmp_path / "questions.json"
    path.write_text(json.dumps([{"question": "q", "answer": "a"}]))
    assert len(load_questions(str(path))) == 1


def test_limit_keeps_the_first(tmp_path):
    path = write(tmp_path / "q.jsonl", [{"question": str(index), "answer": str(index)} for index in range(5)])
    assert load_questions(path, limit=2)["solution"][:] == ["$0$", "$1$"]
    assert len(load_questions(path, limit=9)) == 5


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("She earns 40*30 = <<40*30=1200>>1,200 dollars.\n#### 1,200", "1200", "1"),
        ("#### 18", "\\$18", "81"),
        ("18.", "18 \\text{ dollars}", "18.5"),
        ("-3", "-3.0", "3"),
        ("1,234", "1{,}234", "234"),
        ("\\frac{1}{2}", "0.5", "2"),
        ("$x^2$", "x^2", "x"),
        ("$1$, $2$", "2, 1", "1"),
        ("(1, 2)", "\\left(1, 2\\right)", "(2, 1)"),
        ("C", "\\text{C}", "D"),
        ("\\text{Evelyn}", "Evelyn", "Bob"),
    ],
)
def test_trl_grades_what_data_sets_call_an_answer(answer, right, wrong):
    pytest.importorskip("math_verify")
    texts = [f"So it is $\\boxed{{{right}}}$.", f"So it is $\\boxed{{{wrong}}}$."]
    assert are_correct(texts, [as_solution(answer)] * 2) == [True, False]


@pytest.mark.skipif(not (SHARED / "data").exists(), reason="needs ../shared/data")
def test_trl_grades_the_answers_of_two_benchmarks():
    pytest.importorskip("math_verify")
    missed, equal = [], []
    for name in ("gsm8k", "math500"):
        with gzip.open(SHARED / "data" / name / "test.jsonl.gz", "rt", encoding="utf-8") as file:
            answers = [json.loads(line)["answer"] for line in file][:100]
        texts = [f"So it is $\\boxed{{{answer}}}$." for answer in answers]
        solutions = list(map(as_solution, answers))
        missed += [a for a, right in zip(answers, are_correct(texts, solutions), strict=True) if not right]
        pairs = zip(answers, answers[1:], are_correct(texts[:-1], solutions[1:]), strict=False)
        equal += [(one, other) for one, other, right in pairs if right and one != other]
    assert missed == ["11\\sqrt2"]  # TRL wants \sqrt{2}
    assert equal == [("5", "x=5")]  # answers to two questions that are indeed equal


@pytest.mark.parametrize("text", ["", "it is 72", "\\boxed{72", "\\boxed{71}", "\\boxed{71} or \\boxed{72}"])
def test_what_is_not_one_right_box_is_wrong(text):
    pytest.importorskip("math_verify")
    assert are_correct([text, "\\boxed{72}"], ["$72$", "$72$"]) == [False, True]


def test_a_hub_name_is_not_looked_for_on_disk(monkeypatch):
    import datasets

    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_dict({"question": ["q", "r"], "answer": ["w #### 1", "w #### 2"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_questions("openai/gsm8k", split="test", config="main", limit=1)["solution"][:] == ["$1$"]
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"question": "q", "solution": "s"}],
            r"Row 1 .* has no answer or final_answer; its columns are question, solution",
        ),
        (
            [{"question": "q", "answer": "a"}, {"text": "p"}],
            r"Row 2 .* has no question or problem or prompt and no answer or final_answer",
        ),
        ([{"question": "q", "answer": None}], r"Row 1 .* has no answer"),
        ([{"prompt": ["q"], "answer": "a"}], r"row 1 of .* is neither a text nor a conversation"),
        ([{"prompt": [], "answer": "a"}], r"row 1 of .* is neither a text nor a conversation"),
        (
            [{"prompt": [{"role": "assistant", "content": "q"}], "answer": "a"}],
            r"row 1 of .* that ends with the role \"user\"",
        ),
        ([], "cannot be read as json"),
    ],
)
def test_a_bad_file_is_named_with_its_fault(tmp_path, rows, message):
    path = write(tmp_path / "bad.jsonl", rows)
    with pytest.raises(ValueError, match=message) as caught:
        load_questions(path)
    assert path in str(caught.value)


@pytest.mark.parametrize(
    ("row", "columns", "answer"),
    [
        ({"problem": "q", "answer": 5}, {}, "5"),
        ({"prompt": "q", "answer": "5"}, {}, "5"),
        ({"question": "q", "final_answer": ["1", "2"]}, {}, "1, 2"),
        (
            {"prompt": "q", "solution": "34", "answer": "x"},
            {"question_column": "prompt", "answer_column": "solution"},
            "34",
        ),
        ({"question": "q", "problem": "p", "answer": "1", "final_answer": "2"}, {}, "1"),
    ],
)
def test_columns_have_the_names_that_sets_on_the_hub_give_them(row, columns, answer, tmp_path):
    questions = load_questions(write(tmp_path / "q.jsonl", [row]), **columns)
    assert questions[0]["prompt"][0]["content"].startswith("q\n") and questions["solution"][:] == [f"${answer}$"]


def test_a_conversation_stays_one_and_ends_with_the_instruction(tmp_path):
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}
    path = write(tmp_path / "q.jsonl", [{"prompt": [system, user], "answer": "4"}])
    assert load_questions(path)[0]["prompt"] == [system, {"role": "user", "content": f"2 + 2?\n\n{INSTRUCTION}"}]


def test_a_named_column_must_be_there(tmp_path):
    path = write(tmp_path / "q.jsonl", [{"question": "q", "answer": "a"}])
    with pytest.raises(ValueError, match="has no prompt; its columns are question, answer"):
        load_questions(path, question_column="prompt")


@pytest.mark.parametrize("name", ["no.jsonl", "no.jsonl.gz", "./no"])
def test_a_missing_file_is_not_mistaken_for_a_hub_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist: give a .json, .jsonl, .csv, .parquet file"):
        load_questions(name)


def test_files_that_are_not_what_their_name_says(tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"question": \n')
    (tmp_path / "plain.jsonl.gz").write_text('{"question": "q", "answer": "a"}\n')
    (tmp_path / "bytes.parquet").write_text("question,answer\n")
    (tmp_path / "table.xlsx").write_text("question,answer\n")
    for name, message in [
        ("broken.jsonl", "cannot be read as json: JSON parse error"),
        ("plain.jsonl.gz", "cannot be read as json: .*Not a gzipped file"),
        ("bytes.parquet", "cannot be read as parquet: "),
        ("table.xlsx", "is not a .json, .jsonl, .csv, .parquet file"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_questions(str(tmp_path / name))


def test_tables_are_read_too(tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"question": ["1+1", "1+2"], "answer": ["2", "3"]})
    rows.to_csv(tmp_path / "q.csv")
    rows.to_parquet(tmp_path / "q.parquet")
    for name in ("q.csv", "q.parquet"):
        questions = load_questions(str(tmp_path / name))
        assert questions["solution"][:] == ["$2$", "$3$"] and questions[0]["prompt"][0]["content"].startswith("1+1\n")


def test_a_limit_that_leaves_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="limit=0"):
        load_questions(str(tmp_path / "unread.jsonl"), limit=0)
