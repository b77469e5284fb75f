"""What `rollouts_ahead` refuses, and how it looks one rollout ahead."""

import pytest
from accelerate import Accelerator
from datasets import Dataset
from trl.trainer.utils import RepeatSampler

from trl_qurl import QuRLGRPOConfig
from trl_qurl.rollout.ahead import UpcomingRows
from trl_qurl.trainers.arguments import check_arguments

PLAIN = {
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "vllm_mode": "server",
    "num_generations": 2,
}
ROWS = Dataset.from_dict({"prompt": [f"question {number}" for number in range(11)]})


def count(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def config(**settings):
    settings = {"rollouts_ahead": 1, "per_device_train_batch_size": 4} | settings
    return QuRLGRPOConfig("out", **PLAIN | settings)


@pytest.mark.parametrize("name", ["tools", "rollout_func", "environment_factory"])
def test_arguments_that_do_not_fit(name):
    arguments = {"model": "some/model", "train_dataset": ROWS, "reward_funcs": count}
    check_arguments(config(), arguments)
    with pytest.raises(ValueError, match=f"rollouts_ahead=1 .* {name}"):
        check_arguments(config(), arguments | {name: [count]})
    check_arguments(config(rollouts_ahead=0), arguments | {name: [count]})


def test_streams_and_images_are_refused():
    stream = {
        "model": "some/model",
        "train_dataset": ROWS.to_iterable_dataset(),
        "reward_funcs": count,
    }
    with pytest.raises(ValueError, match="rollouts_ahead=1 .* streaming=False"):
        check_arguments(config(), stream)
    check_arguments(config(rollouts_ahead=0), stream)
    images = ROWS.add_column("image", [None] * len(ROWS))
    with pytest.raises(ValueError, match="rollouts_ahead=1 .* images"):
        check_arguments(
            config(), {"model": "some/model", "train_dataset": images, "reward_funcs": count}
        )


def sampler(shuffle=True):
    return RepeatSampler(
        ROWS, mini_repeat_count=2, batch_size=3, repeat_count=4, shuffle=shuffle, seed=5
    )


def rollouts(epochs, shuffle=True):
    """What TRL's dataloader yields once per rollout: every
    prompt twice, three prompts at a time.
    """
    again = sampler(shuffle)
    for _ in range(epochs):
        indices = list(again)
        yield from (
            [ROWS[index] for index in indices[start : start + 6]]
            for start in range(0, len(indices), 24)
        )


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_rows_after_these(shuffle):
    upcoming = UpcomingRows(sampler(shuffle), ROWS, Accelerator(cpu=True))
    expected = list(rollouts(3, shuffle))
    assert len(expected) == 9 and (expected[0] != expected[3]) == shuffle
    for rows, following in zip(expected, expected[1:], strict=False):
        assert upcoming.after(rows) == following


def test_a_resumed_run_finds_its_place():
    upcoming, expected = UpcomingRows(sampler(), ROWS, Accelerator(cpu=True)), list(rollouts(2))
    assert upcoming.after(expected[2]) == expected[3]
    assert upcoming.after(expected[3]) == expected[4]


def test_rows_that_nobody_drew(caplog):
    upcoming, expected = UpcomingRows(sampler(), ROWS, Accelerator(cpu=True)), list(rollouts(1))
    others = [{"prompt": row["prompt"] + "?"} for row in expected[0]]
    assert upcoming.after(others) == upcoming.after(expected[0]) == []
    [warning] = [
        record.getMessage() for record in caplog.records if "rollouts_ahead" in record.getMessage()
    ]
    assert "rollouts_ahead has no effect" in warning
