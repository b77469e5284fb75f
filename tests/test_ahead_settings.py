"""What `rollouts_ahead` refuses, and how it looks one rollout ahead."""

import pytest
from accelerate import Accelerator
from datasets import Dataset
from support.building import reward
from support.configs import PLAIN
from trl.trainer.utils import RepeatSampler

from trl_qurl import QuRLGRPOConfig
from trl_qurl.rollout.ahead import UpcomingRows
from trl_qurl.trainers.arguments import check_arguments

ROWS = Dataset.from_dict({"prompt": [f"question {number}" for number in range(11)]})


def check(rollouts_ahead, arguments):
    settings = {
        "vllm_mode": "server",
        "num_generations": 2,
        "per_device_train_batch_size": 4,
    }
    config = QuRLGRPOConfig("out", rollouts_ahead=rollouts_ahead, **PLAIN | settings)
    given = {
        "model": "some/model",
        "train_dataset": ROWS,
        "reward_funcs": reward,
    }
    check_arguments(config, given | arguments)


@pytest.mark.parametrize(
    ("argument", "value", "named"),
    [
        ("tools", [reward], "tools"),
        ("rollout_func", [reward], "rollout_func"),
        ("environment_factory", [reward], "environment_factory"),
        ("train_dataset", ROWS.to_iterable_dataset(), "streaming=False"),
        ("train_dataset", ROWS.add_column("image", [None] * len(ROWS)), "images"),
    ],
)
def test_arguments_that_do_not_fit(argument, value, named):
    check(1, {})
    check(0, {argument: value})
    with pytest.raises(ValueError, match=f"rollouts_ahead=1 .* {named}"):
        check(1, {argument: value})


def sampler(shuffle=True):
    return RepeatSampler(
        ROWS, mini_repeat_count=2, batch_size=3, repeat_count=4, shuffle=shuffle, seed=5
    )


def upcoming(shuffle=True):
    return UpcomingRows(sampler(shuffle), ROWS, Accelerator(cpu=True))


def rollouts(epochs, shuffle=True):
    """What TRL's dataloader yields once per rollout: every prompt twice, three prompts at a time."""
    again = sampler(shuffle)
    for _ in range(epochs):
        indices = list(again)
        for start in range(0, len(indices), 24):
            yield [ROWS[index] for index in indices[start : start + 6]]


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_rows_after_these(shuffle):
    rows = upcoming(shuffle)
    expected = list(rollouts(3, shuffle))
    assert len(expected) == 9
    assert (expected[0] != expected[3]) == shuffle
    assert [rows.after(each) for each in expected[:-1]] == expected[1:]
    resumed = upcoming(shuffle)
    assert [resumed.after(each) for each in expected[3:5]] == expected[4:6]


def test_rows_that_nobody_drew(caplog):
    rows, [first, *_] = upcoming(False), rollouts(1, False)
    others = [{"prompt": row["prompt"] + "?"} for row in first]
    assert rows.after(others) == rows.after(first) == []
    [warning] = [text for text in caplog.messages if "rollouts_ahead" in text]
    assert "rollouts_ahead has no effect" in warning
