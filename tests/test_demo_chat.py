"""`trl-qurl demo --model`: a chat model of the user's on one-digit arithmetic."""

import subprocess

import pytest
from conftest import child_environment
from documents import ROOT
from tiny import save_tiny

from trl_qurl import cli
from trl_qurl.lab.demo.chat import conversation, is_right, questions, right_number
from trl_qurl.lab.runs import read_run

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def test_no_question_is_both_held_out_and_learned_from():
    held_out, learned = questions(held_out=True), questions(held_out=False)
    assert (len(held_out), len(learned)) == (32, 96) and not set(held_out) & set(learned)
    assert {question.text.split()[3] for question in held_out} == {"times", "plus"}
    for text, answer in held_out + learned:
        _, _, a, operation, b = text.rstrip("?").split()
        assert answer == (int(a) * int(b) if operation == "times" else int(a) + int(b))


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("12", True),
        (" 12.", True),
        ("3 x 4 = 12", True),
        ("12 is 3 x 4", False),
        ("112", False),
        ("", False),
    ],
)
def test_the_last_number_counts(text, right):
    assert is_right(text, 12) is right
    assert right_number([[{"role": "assistant", "content": text}]], [12]) == [float(right)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "./nowhere"], "nowhere"),
        (["--model", "policy", "--algorithm", "ppo"], "--algorithm ppo does not work with --model"),
        (["--rollouts", "0"], "--rollouts is 0"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, capsys):
    assert cli.main(["demo", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.vllm
@pytest.mark.xdist_group("colocated")
def test_answers_before_and_after_are_shown(warm_python, tmp_path):
    save_tiny(tmp_path / "model", TEMPLATE, family="llama", max_position_embeddings=256)
    command = [
        warm_python,
        "-m",
        "trl_qurl",
        "demo",
        "--model",
        "model",
        "--rollouts",
        "2",
        "--output-dir",
        "out",
    ]
    environment = child_environment(COLUMNS="80", PYTHONPATH=str(ROOT))
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 1, done.stderr[-3000:]
    assert "the demo failed: accuracy went from 0.00 to 0.00" in done.stderr
    assert (
        "checkpoint shards" not in done.stderr
        and "\nNext: trl-qurl grpo --model model " in done.stdout
    )
    printed = " ".join(done.stdout.split())
    assert "What is 2 times 2?" in printed and "0.00 before, 0.00 after 2 rollouts" in printed
    rows = [row for row in read_run(tmp_path / "out").rows if "reward" in row]
    assert len(rows) == 2 and "entropy" in rows[-1]  # the fourth panel of the figure
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert conversation(questions(held_out=True)[0])[0]["content"].endswith(
        "? Reply with the number only."
    )
