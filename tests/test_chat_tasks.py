"""The tasks of `benchmarks/real_model.py`, on which its stored results rest."""

from benchmarks import real_model
from benchmarks.chat_tasks import TASKS, last_number


def test_no_question_is_both_held_out_and_learned_from():
    for task in TASKS.values():
        held_out = [messages for messages, _ in task.held_out]
        assert held_out
        for messages, _ in task.learned:
            assert messages not in held_out


def test_one_digit_arithmetic():
    task = TASKS["arithmetic"]
    answers = {}
    for messages, answer in (*task.learned, *task.held_out):
        answers[messages[-1]["content"]] = answer
    assert len(answers) == 128
    assert answers["What is 7 times 8?"] == 56
    assert answers["What is 7 plus 8?"] == 15
    assert last_number("3 x 4 = 12.", 12) == 1
    assert last_number("12 is 3 x 4", 12) == 0
    assert last_number("112", 12) == 0


def test_updates_per_rollout():
    for updates in (1, 4):  # a rollout has 32 completions
        settings = real_model.training_settings(10, updates)
        assert settings["max_steps"] == 10 * updates
        assert settings["per_device_train_batch_size"] * settings["steps_per_generation"] == 32
