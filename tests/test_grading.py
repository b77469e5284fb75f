"""The default reward: which answers are right, as training asks it."""

import json

import pytest
from documents import ROOT, rows

from trl_qurl.lab.data import load_questions
from trl_qurl.lab.grading import as_solution, is_text
from trl_qurl.lab.recipes.rewards import load_rewards

pytest.importorskip("math_verify")

PAIRS = []
for *code, verdict, _ in rows(ROOT / "tests/grading.md"):
    answer, box = (cell.strip("`").replace(" ⏎ ", "\n") for cell in code)
    PAIRS.append((answer, box, verdict))
TEXTS = (
    "Paris New York rock and roll état Yes A (A) B12 e4 H2O 9 am 10:30 2024-01-05 192.168.0.1 "
    "30 October 555-4567 07:00 7 AM 05/01/2024 snake_case \\text{(C)} "
    "1.05 psi 5.04% interest 12:05 1 1/2 psi"
)
ANSWERS = [answer for answer, _, _ in PAIRS]


@pytest.fixture(scope="module")
def grade(tmp_path_factory):
    """Grades texts as a recipe does: answers from a file, the reward by its name, completions as
    conversations.
    """
    [reward] = load_rewards(["accuracy_reward"])
    path = tmp_path_factory.mktemp("grading") / "questions.json"

    def graded(answers, texts, **kwargs):
        questions = [{"question": "q", "answer": answer} for answer in answers]
        path.write_text(json.dumps(questions))
        solutions = load_questions(str(path))["solution"][:]
        completions = [[{"role": "assistant", "content": text}] for text in texts]
        return reward(completions=completions, solution=solutions, **kwargs)

    return graded


def test_the_table_of_right_and_wrong(grade):
    rewards = grade(ANSWERS, [f"So it is $\\boxed{{{box}}}$." for _, box, _ in PAIRS])
    missed = []
    for pair, reward in zip(PAIRS, rewards, strict=True):
        *_, verdict = pair
        if reward != float(verdict == "right"):
            missed.append(pair)
    assert not missed


def test_every_answer_of_the_table_is_right_in_its_own_box(grade):
    solutions = list(map(as_solution, ANSWERS))
    boxes = [f"\\boxed{{{solution[1:-1]}}}" for solution in solutions]
    rewards = grade(ANSWERS, boxes)
    assert {*rewards} == {1.0}
    assert list(map(as_solution, solutions)) == solutions, "a solution stays as it is"
    texts = [answer for answer in ANSWERS if is_text(as_solution(answer))]
    assert " ".join(dict.fromkeys(texts)) == TEXTS


def test_the_documented_rows_are_in_the_table():
    page = (ROOT / "docs" / "from-trl.md").read_text()
    _, _, table = page.partition("| answer | box | verdict | why |\n|---|---|---|---|\n")
    documented = table.partition("\n\n")[0].splitlines()
    known = (ROOT / "tests" / "grading.md").read_text().splitlines()
    assert len(documented) == 10
    assert {*documented} <= {*known}


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("72", "The final answer is $72$.", 0.0),  # TRL's reward alone reads it
        ("72", "", 0.0),
        ("72", "\\boxed{72", 0.0),
        ("72", "Put it into \\boxed{ like this: \\boxed{72}", 1.0),
        ("72", "\\boxed{\\frac{\\sqrt{\\frac{144^{2}}{1}}}{2}}", 1.0),
        ("72", "\\boxed{72} or \\boxed{71}", 0.0),
        ("72", "\\boxed{71} or \\boxed{72}", 0.0),
        ("72", "\\boxed{72}, so \\boxed{72}", 1.0),
        ("1, 2", "\\boxed{1} and \\boxed{2}", 1.0),
        ("Paris", "Paris", 0.0),
        ("Paris", "\\boxed{Paris} or \\boxed{London}", 0.0),
        ("Paris", "\\boxed{It is \\boxed{Paris}}", 1.0),
    ],
)
def test_what_is_in_a_box(grade, answer, text, expected):
    assert grade([answer], [text]) == [expected]


def test_trl_logs_once_what_it_compared(grade):
    logged = []
    text = "\\boxed{12.5 percent}"
    assert grade(["12.5"], [text], log_extra=lambda *given: logged.append(given)) == [1.0]
    assert ("solution", ["$12.5$"]) in logged
    assert len(logged) == 3
    assert len(dict(logged)) == 3
