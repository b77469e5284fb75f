"""The tasks of `benchmarks/real_model.py`, on which its stored results rest."""

import pytest

from benchmarks.chat_tasks import TASKS, last_number


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_no_question_is_both_held_out_and_learned_from(task):
    held_out = [messages for messages, _ in task.held_out]
    assert held_out and not [messages for messages, _ in task.learned if messages in held_out]


def test_one_digit_arithmetic():
    every = [*TASKS["arithmetic"].learned, *TASKS["arithmetic"].held_out]
    answers = {messages[-1]["content"]: answer for messages, answer in every}
    assert len(answers) == 128 and len(TASKS["arithmetic"].held_out) == 32
    assert answers["What is 7 times 8?"] == 56 and answers["What is 7 plus 8?"] == 15


@pytest.mark.parametrize(
    ("text", "right"),
    [("12", 1), ("3 x 4 = 12.", 1), ("12 is 3 x 4", 0), ("112", 0), ("", 0)],
)
def test_the_last_number_counts(text, right):
    assert last_number(text, 12) == right
