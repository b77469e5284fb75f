"""Loading and grading questions, and the errors for mistakes in their files."""

import gzip
import json
import math

import pytest
from tiny import SHARED

from trl_qurl.lab.data import INSTRUCTION, load_questions
from trl_qurl.lab.evaluation.tasks import are_correct
from trl_qurl.lab.grading import accuracy_reward, as_solution, is_text


def write(path, rows):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


@pytest.mark.parametrize("name", ["questions.jsonl", "questions.jsonl.gz"])
def test_rows_become_one_user_message_and_a_text_answer(tmp_path, name):
    rows = [{"question": "2 + 2?", "answer": 4}, {"question": "Half of 1?", "answer": "\\frac12"}]
    path = write(tmp_path / name, rows)
    questions = load_questions(path)
    assert questions.column_names == ["prompt", "solution"]
    assert questions[0]["prompt"] == [{"role": "user", "content": f"2 + 2?\n\n{INSTRUCTION}"}]
    assert questions["solution"][:] == ["$4$", "$\\frac{1}{2}$"]


def test_limit_keeps_the_first(tmp_path):
    path = write(
        tmp_path / "q.jsonl", [{"question": str(index), "answer": str(index)} for index in range(5)]
    )
    assert load_questions(path, limit=2)["solution"][:] == ["$0$", "$1$"]
    assert len(load_questions(path, limit=9)) == 5
    with pytest.raises(ValueError, match="limit=0"):
        load_questions(path, limit=0)


@pytest.mark.parametrize(
    ("answer", "solution", "right", "wrong"),
    [
        ("She earns 40*30 = <<40*30=1200>>1,200 dollars.\n#### 1,200", "$1200$", ["1200"], ["1"]),
        ("1,234", "$1234$", ["1{,}234"], ["234"]),
        ("$1$, $2$", "$1$, $2$", ["2, 1"], ["1"]),
        ("(1, 2)", "$(1, 2)$", ["\\left(1, 2\\right)"], ["(2, 1)"]),
        (
            "18 dollars",
            "$18$",
            ["18", "\\$18", "18 dollars", "18\\text{ dollars}"],
            ["81", "dollars"],
        ),
        ("#### 72 clips", "$72$", ["72"], ["27"]),
        ("5 km/h", "$5$", ["5", "5\\,\\text{km/h}"], ["6"]),
        ("€5", "$5$", ["5", "€5"], ["6"]),
        ("20\\text{ miles}", "$20$", ["20"], ["2"]),
        ("\\frac{1}{2} cups", "$\\frac{1}{2}$", ["0.5"], ["2"]),
        ("so \\boxed{\\frac{1}{2}}.", "$\\frac{1}{2}$", ["0.5"], ["2"]),
        ("2xy", "$2xy$", ["2yx"], ["2"]),
        ("x - y", "$x - y$", ["-y + x"], ["y - x"]),
        ("1.5 million", "$1500000$", ["1.5 million"], ["1.5"]),
        ("9 am", "$\\text{9 am}$", ["9\\text{ am}"], ["9 pm", "9"]),
        ("192.168.0.1", "$\\text{192.168.0.1}$", ["192.168.0.1"], ["192.168.0.2"]),
        ("10:30", "$\\text{10:30}$", ["10:30"], ["1/3"]),
        (
            "Paris",
            "$\\text{Paris}$",
            ["Paris", "\\text{paris.}", "\\textbf{Paris}"],
            ["Siarp", "London"],
        ),
        ("New York", "$\\text{New York}$", ["new  york"], ["York New"]),
        ("rock and roll", "$\\text{rock and roll}$", ["rock and roll"], ["roll and rock"]),
        ("état", "$\\text{état}$", ["état", "e\u0301tat"], ["tate"]),
        ("2024-01-05", "$\\text{2024-01-05}$", ["2024-01-05"], ["2018"]),
        ("C++", "$C++$", ["C++"], ["C"]),  # mathematics that TRL cannot read
        ("(A)", "$\\text{(A)}$", ["A", "\\text{(A)}"], ["B"]),
    ],
)
def test_numbers_are_compared_as_mathematics_and_words_as_text(answer, solution, right, wrong):
    pytest.importorskip("math_verify")
    assert as_solution(answer) == solution and is_text(solution) == ("\\text" in solution)
    for given, expected in [*((text, 1.0) for text in right), *((text, 0.0) for text in wrong)]:
        completion = [{"role": "assistant", "content": f"So it is \\boxed{{{given}}}."}]
        assert accuracy_reward([completion], [solution]) == [expected], given


@pytest.mark.skipif(not (SHARED / "data").exists(), reason="needs ../shared/data")
def test_trl_grades_the_answers_of_two_benchmarks():
    pytest.importorskip("math_verify")
    missed, equal = [], []
    for name in ("gsm8k", "math500"):
        with gzip.open(SHARED / "data" / name / "test.jsonl.gz", "rt", encoding="utf-8") as file:
            answers = [json.loads(line)["answer"] for line in file][:100]
        texts = [f"So it is $\\boxed{{{answer}}}$." for answer in answers]
        solutions = list(map(as_solution, answers))
        missed += [
            a for a, right in zip(answers, are_correct(texts, solutions), strict=True) if not right
        ]
        pairs = zip(answers, answers[1:], are_correct(texts[:-1], solutions[1:]), strict=False)
        equal += [(one, other) for one, other, right in pairs if right and one != other]
    assert missed == []  # TRL cannot read 11\sqrt2, but the same text is right
    assert equal == [("5", "x=5")]  # answers to two questions that are indeed equal


@pytest.mark.parametrize(
    "text", ["", "it is 72", "\\boxed{72", "\\boxed{71}", "\\boxed{71} or \\boxed{72}"]
)
def test_only_one_correct_box_is_right(text):
    pytest.importorskip("math_verify")
    assert are_correct([text, "\\boxed{72}"], ["$72$", "$72$"]) == [False, True]
    words = text.replace("72", "Paris").replace("71", "London")
    assert are_correct([words, "\\boxed{Paris}"], ["$\\text{Paris}$"] * 2) == [False, True]


def test_a_hub_name_is_not_looked_for_on_disk(monkeypatch):
    import datasets

    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return datasets.Dataset.from_dict(
            {"question": ["q", "r"], "answer": ["w #### 1", "w #### 2"]}
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_questions("openai/gsm8k", split="test", config="main", limit=1)["solution"][:] == [
        "$1$"
    ]
    assert calls == [(("openai/gsm8k", "main"), {"split": "test"})]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"question": "q", "reply": "s"}],
            r"Row 1 .* has no answer or final_answer or solution or ground_truth; its columns are "
            r"question, reply",
        ),
        (
            [{"question": "q", "answer": "a"}, {"text": "p"}],
            r"Row 2 .* has no question or problem .* and no answer or .*: complete or remove the "
            r"row",
        ),
        (
            [{"Question": "q", "The answer": "a"}],
            "rename the columns, or, for training, pass --question_column Question --answer_column "
            "NAME",
        ),
        *[
            (
                [{"question": "q", "answer": empty}],
                r"Row 1 .* has an empty answer: fill it in, or remove the row",
            )
            for empty in (None, "", "  ", [], math.nan)
        ],
        *[
            ([{"question": "q", "answer": a}], "answer in row 1 .* is not a text, num")
            for a in ({"v": 7}, [{}], ["x", None])
        ],
        *[
            ([{"question": empty, "answer": "7"}], r"Row 1 .* has an empty question")
            for empty in (None, "", "  ")
        ],
        (
            [{"question": {"text": "q"}, "answer": "7"}],
            r"row 1 of .* is neither a text nor a conversation",
        ),
        (
            [{"question": [{"role": "user", "content": " "}], "answer": "7"}],
            r"row 1 of .* is neither a text nor",
        ),
        (["q"], r"Row 1 .* is not an object"),
        ([{"prompt": ["q"], "answer": "a"}], r"row 1 of .* is neither a text nor a conversation"),
        ([{"prompt": [], "answer": "a"}], r"Row 1 .* has an empty prompt"),
        (
            [{"prompt": [{"role": "assistant", "content": "q"}], "answer": "a"}],
            r"row 1 of .* that ends with the role \"user\"",
        ),
        ([], "contains no questions"),
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
        ({"question": "q", "final_answer": ["1", "2"]}, {}, "1, 2"),
        (
            {"prompt": "q", "solution": "34", "answer": "x"},
            {"question_column": "prompt", "answer_column": "solution"},
            "34",
        ),
        ({"question": "q", "problem": "p", "answer": "1", "final_answer": "2"}, {}, "1"),
    ],
)
def test_columns_may_have_the_usual_names_of_the_hub(row, columns, answer, tmp_path):
    questions = load_questions(write(tmp_path / "q.jsonl", [row]), **columns)
    assert questions[0]["prompt"][0]["content"].startswith("q\n") and questions["solution"][:] == [
        f"${answer}$"
    ]


def test_a_conversation_stays_one_and_ends_with_the_instruction(tmp_path):
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}
    path = write(tmp_path / "q.jsonl", [{"prompt": [system, user], "answer": "4"}])
    assert load_questions(path)[0]["prompt"] == [
        system,
        {"role": "user", "content": f"2 + 2?\n\n{INSTRUCTION}"},
    ]


@pytest.mark.parametrize("name", ["no.jsonl", "no.jsonl.gz", "./no", "a/b/no", "~/home.jsonl"])
def test_a_missing_file_is_not_mistaken_for_a_hub_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "home.jsonl", [])
    with pytest.raises(
        FileNotFoundError, match="does not exist: give a .json, .jsonl, .csv, .parquet file"
    ):
        load_questions(name)


def test_files_of_another_format_are_refused(tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"question": "q"}\n{"question": \n')
    (tmp_path / "plain.jsonl.gz").write_text('{"question": "q", "answer": "a"}\n')
    (tmp_path / "bytes.parquet").write_text("question,answer\n")
    (tmp_path / "table.xlsx").write_text("question,answer\n")
    (tmp_path / "comma.csv").write_text("question,answer\nOne, two, three?,4\n")
    (tmp_path / "excel.csv").write_text("question;answer\nq;a\n")
    (tmp_path / "twice.csv").write_text("question,answer,answer\nq,a,b\n")
    (tmp_path / "gap.jsonl").write_text(
        '{"question": "q", "answer": "a"}\n\n\n{"question": "q" "answer": "a"}\n'
    )
    (tmp_path / "list.json").write_text('[\n\n{"question": "q" "answer": "a"}]\n')
    (tmp_path / "empty.jsonl").touch()
    for name, message in [
        ("broken.jsonl", "cannot be read as jsonl: Expecting value in line 2, column 14"),
        ("gap.jsonl", "cannot be read as jsonl: Expecting ',' delimiter in line 4, column 18"),
        ("list.json", "cannot be read as json: Expecting ',' delimiter in line 3, column 18"),
        ("empty.jsonl", "empty.jsonl contains no questions"),
        (
            "excel.csv",
            "cannot be read as csv: its columns are separated by ';'; save it with commas",
        ),
        (
            "twice.csv",
            "cannot be read as csv: several columns are named answer; rename all but one",
        ),
        ("plain.jsonl.gz", "cannot be read as jsonl: Not a gzipped file"),
        ("bytes.parquet", "cannot be read as parquet: "),
        ("comma.csv", "Row 1 of .* has more cells than the file has columns"),
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
        assert questions["solution"][:] == ["$2$", "$3$"] and questions[0]["prompt"][0][
            "content"
        ].startswith("1+1\n")


def test_values_are_not_converted(tmp_path):
    """Not as `datasets` and pandas guess them: NA as nothing, long integers beside decimals as
    rounded numbers.
    """
    (tmp_path / "q.csv").write_text("\ufeffquestion,answer\nq,NA\nq,12345678901234567\nq,1.50\n")
    assert load_questions(str(tmp_path / "q.csv"))["solution"][:] == [
        "$\\text{NA}$",
        "$12345678901234567$",
        "$1.50$",
    ]
    path = tmp_path / "Q.JSONL"
    path.write_text(
        '{"question": "q", "answer": 12345678901234567.5}\n\n{"question": 1, "answer": false}\n'
    )
    assert load_questions(str(path))["solution"][:] == ["$12345678901234567.5$", "$\\text{False}$"]


def test_reward_functions_of_your_own_get_all_columns(tmp_path):
    path = write(tmp_path / "q.jsonl", [{"question": "q", "level": 3, "solution": 4.5}])
    rows = load_questions(path, needs_answers=False, keep_columns=True)
    prompt = [{"role": "user", "content": "q"}]
    assert rows[:] == {"question": ["q"], "level": [3], "solution": [4.5], "prompt": [prompt]}
    [row] = load_questions(path, keep_columns=True)
    assert (row["level"], row["solution"]) == (3, "$4.5$") and row["prompt"][0][
        "content"
    ] == f"q\n\n{INSTRUCTION}"
    for levels in ((1, "x"), ("x", 1), (10**30, 1)):
        path = write(
            tmp_path / "q.jsonl",
            [{"question": "q", "answer": "a", "level": level} for level in levels],
        )
        with pytest.raises(
            ValueError, match=r"Column level of .*q.jsonl mixes types .*: make all texts"
        ):
            load_questions(path, keep_columns=True)
