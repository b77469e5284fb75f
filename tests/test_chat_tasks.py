"""The tasks of `benchmarks/real_model.py`, on which its stored results rest."""

from benchmarks import real_model
from benchmarks.chat_tasks import TASKS, last_number


def test_no_question_is_both_held_out_and_learned_from():
    for task in TASKS.values():
        held_out = [messages for messages, _ in task.held_out]
        assert held_out
        assert not [messages for messages, _ in task.learned if messages in held_out]


def test_one_digit_arithmetic():
    every = [*TASKS["arithmetic"].learned, *TASKS["arithmetic"].held_out]
    answers = {messages[-1]["content"]: answer for messages, answer in every}
    assert len(answers) == 128
    assert (answers["What is 7 times 8?"], answers["What is 7 plus 8?"]) == (56, 15)
    assert [last_number(text, 12) for text in ("3 x 4 = 12.", "12 is 3 x 4", "112")] == [1, 0, 0]


def test_updates_per_rollout():
    for updates in (1, 4):  # a rollout has 32 completions
        settings = real_model.training_settings(10, updates)
        assert settings["max_steps"] == 10 * updates
        assert settings["per_device_train_batch_size"] * settings["steps_per_generation"] == 32
