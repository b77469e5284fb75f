"""Batches that dynamic sampling fills: all groups useful where there are such prompts, bounded
where there are not.
"""

import logging
import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.logging import MultiProcessAdapter
from datasets import Dataset
from made_up_policy import ROWS, MadeUpPolicy, tells_apart
from support.building import build, reward, settings_of
from support.training import metrics_by_step

from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer
from trl_qurl.trainers.checks.arguments import check_arguments
from trl_qurl.trainers.dynamic_sampling import PromptStream, informative, row_digest

NAN = math.nan
COLUMNS = ROWS[0].keys()
GROUP_SIZE = 3


def batch_of(*numbers, rows=ROWS):
    batch = []
    for number in numbers:
        batch += [rows[number]] * GROUP_SIZE
    return batch


def fill(*numbers, rows=ROWS, **settings):
    """Fill a batch of these rows; the policy, and what it filled."""
    accelerator = Accelerator(cpu=True)  # a trainer's arguments reset what is shared
    policy = MadeUpPolicy(accelerator, GROUP_SIZE, PromptStream(rows, seed=0), **settings)
    return policy, policy.fill(batch_of(*numbers, rows=rows))


def draw(stream, count):
    return [row["number"] for row, _ in stream.draw(count, COLUMNS, set())]


def group_numbers(filled):
    return [sample.row["number"] for sample in filled.samples[::GROUP_SIZE]]


def test_useless_groups_give_way_and_useful_ones_stay_where_they_are():
    policy, filled = fill(0, 1, 3, 4, 5)
    numbers = group_numbers(filled)
    assert numbers[0] == 0
    assert numbers[2] == 3
    for number in numbers:
        assert number % 3 == 0, "a useless group was left"
    assert len(set(numbers)) == 5, "a prompt is in the batch twice"
    # Whole groups, each completion once and in its order, with its own tokens, reward and columns.
    for place, sample in enumerate(filled.samples):
        text = f"question {sample.row['number']}, answer {place % GROUP_SIZE}"
        assert sample.completion == text
        assert bytes(sample.completion_ids).decode() == text
        assert len(sample.logps) == len(text)
        expected = [float(place % GROUP_SIZE == 0), sample.row["number"]]
        assert filled.rewards[place].tolist() == expected
    prompt_ids, _, _, completions, logps, *_ = filled.generated()
    assert completions == [sample.completion for sample in filled.samples]
    assert len(logps) == len(prompt_ids) == 15
    metrics = filled.metrics
    assert metrics["dynamic_sampling/rounds"] == len(policy.rounds)
    assert metrics["dynamic_sampling/discarded_share"] == pytest.approx(1 - 15 / sum(policy.rounds))
    assert metrics["dynamic_sampling/filled_share"] == 1.0


def test_rounds_are_as_large_as_they_have_to_be():
    # Two of five are useful so far: three missing ones take 3 / (2 / 5) = 7.5 prompts, but at most
    # a batch of 5.
    policy, _ = fill(0, 1, 3, 4, 5)
    assert policy.rounds[1] == 5 * GROUP_SIZE
    # One of five is missing: 1 / (4 / 5) = 1.25, so 2 prompts.
    policy, _ = fill(0, 3, 6, 9, 10)
    assert policy.rounds[1] == 2 * GROUP_SIZE
    policy, filled = fill(0, 3, 6)  # nothing is missing
    assert policy.rounds == [9]
    assert group_numbers(filled) == [0, 3, 6]
    assert policy.sampler.prompts.drawn == 0


def test_useless_prompts_bound_the_rounds_and_are_reported_once(caplog):
    MultiProcessAdapter.warning_once.cache_clear()  # other tests may have caused the warning
    with caplog.at_level(logging.WARNING):
        policy, filled = fill(1, 2, 4, useful=lambda row: False)
        policy.fill(batch_of(5, 7, 8))
    assert policy.rounds == [9] * 20
    assert [sample.row for sample in filled.samples] == batch_of(1, 2, 4), (
        "a batch that cannot be filled is used as it is"
    )
    assert filled.metrics["dynamic_sampling/filled_share"] == 0
    assert filled.metrics["dynamic_sampling/discarded_share"] == pytest.approx(0.9)
    [message] = [text for text in caplog.messages if "Dynamic sampling" in text]
    assert "in 10 rounds" in message
    assert "dynamic_sampling/filled_share" in message


def test_a_data_set_that_runs_out_ends_the_rounds():
    policy, filled = fill(1, 2, 3, rows=ROWS[:4])
    # Of the prompts outside the batch there is only number 0, which is useful.
    assert sorted(group_numbers(filled)) in ([0, 1, 3], [0, 2, 3])
    assert policy.rounds == [9, 3]
    assert filled.metrics["dynamic_sampling/filled_share"] == pytest.approx(2 / 3)


def test_a_prompt_that_was_made_but_not_needed_comes_again():
    policy, filled = fill(0, 1, 3, 4, 5)
    order = draw(PromptStream(ROWS, seed=0), 60)
    drawn = policy.sampler.prompts.drawn
    assert order[drawn - 1] in group_numbers(filled), (
        "the next batch does not go on after the last one needed"
    )
    expected = {0, 3}
    for number in order[:drawn]:
        if number % 3 == 0:
            expected.add(number)
    assert sorted(group_numbers(filled)) == sorted(expected), "a useful prompt was passed over"


def test_two_processes_fill_the_batch_of_one(run_scenario):
    one = run_scenario("filling.py")
    two = run_scenario("filling.py", processes=2)
    assert one["processes"] == 1
    assert two["processes"] == 2
    for alone, together in zip(one["rollouts"], two["rollouts"], strict=True):
        numbers = [prompt for prompt, *_ in alone["samples"][::3]]
        for row in ROWS:
            if row["prompt"] in numbers:
                assert tells_apart(row)
        assert len(set(numbers)) == 4
        # Rounds are cut so that both get as many completions, so their sizes may differ; what is
        # kept does not.
        assert together["samples"] == alone["samples"]
        assert together["rewards"] == alone["rewards"]
        assert together["metrics"]["dynamic_sampling/filled_share"] == 1.0


@pytest.mark.parametrize(
    ("rewards", "useful"),
    [
        ([0.1 + 0.2, 0.3, 0.3], False),  # a rounding apart
        ([NAN, NAN, NAN], False),
        ([NAN, 1.0, 1.0], False),
        ([NAN, 1.0, 0.0], True),
    ],
)
def test_a_group_is_useful_if_its_rewards_differ(rewards, useful):
    # between two other groups, so that neighbors could leak in
    groups = torch.tensor([[2.0, 2.0, 2.0], rewards, [0.0, 3.0, 0.0]])
    assert informative(groups.flatten(), 3).tolist() == [False, useful, True]


def test_a_stream_goes_on_where_it_was_left():
    stream = PromptStream(ROWS, seed=7)
    first = draw(stream, 45)
    second = draw(stream, 45)
    assert draw(PromptStream(ROWS, seed=7, drawn=45), 45) == second
    assert sorted(first + second[:15]) == list(range(60)), "an order holds every prompt once"
    assert draw(PromptStream(ROWS, seed=8), 45) != first
    assert second[15:] != first[:30], "each order is another one"


def test_rows_that_share_a_prompt_are_other_questions():
    """Games: the levels differ, the prompt does not; and some rows are equal in all columns."""
    levels = [{"prompt": "Play.", "number": number} for number in [*range(12), 3, 3]]
    _, filled = fill(1, 2, 3, rows=levels)
    assert filled.metrics["dynamic_sampling/filled_share"] == 1
    numbers = group_numbers(filled)
    for number in numbers:
        assert number % 3 == 0
    assert len({*numbers}) == 3, "rows that are equal are one question"


def test_columns_that_trl_removes_tell_no_rows_apart():
    tried = {row_digest({"prompt": row["prompt"]}) for row in ROWS[5:]}
    drawn = PromptStream(ROWS, seed=0).draw(10, {"prompt"}, tried)
    assert sorted(row["prompt"] for row, _ in drawn) == [
        f"question {number}" for number in range(5)
    ]
    for row, _ in drawn:
        assert row.keys() == {"prompt"}, "reward functions get the same columns for all rows"


def len_reward(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def test_the_reward_that_decides_is_one_of_the_run(tmp_path, monkeypatch):
    init = "trl_qurl.rollout.backend.QuantizedVLLMGeneration._init_vllm"
    monkeypatch.setattr(init, lambda self: vars(self).update(context=64))

    def trainer_with(**settings):
        args = settings_of(QuRLGRPOTrainer, tmp_path, **settings)
        return build(QuRLGRPOTrainer, tmp_path, function=[len_reward, reward], args=args)

    with pytest.raises(ValueError, match="'accuracy', but must be one of 'len_reward', 'reward'"):
        trainer_with(dynamic_sampling_reward="accuracy")
    rewards = torch.tensor([[1.0, 5.0]])
    trainer = trainer_with(dynamic_sampling_reward="reward")
    assert trainer._sampler.judge(rewards).tolist() == [5.0]
    trainer = trainer_with(dynamic_sampling=True, reward_weights=[1.0, 0.0])
    assert trainer._sampler.judge(rewards).tolist() == [1.0]
    trainer.reward_weights = torch.tensor([0.0, 2.0])  # as a callback does
    assert trainer._sampler.judge(rewards).tolist() == [10.0]


def test_what_it_cannot_work_with_is_refused(tmp_path):
    data = Dataset.from_list(ROWS)
    config = QuRLGRPOConfig(tmp_path, bf16=False, dynamic_sampling=True)
    for given, named in (
        ({"train_dataset": data.to_iterable_dataset()}, "a streaming dataset"),
        ({"train_dataset": Dataset.from_list([{"prompt": "a", "image": "b"}])}, "images"),
        ({"tools": [len_reward]}, "tools"),
        ({"rollout_func": len_reward}, "rollout_func"),
        ({"environment_factory": len_reward}, "environment_factory"),
    ):
        with pytest.raises(ValueError, match=named):
            check_arguments(config, {"train_dataset": data, "reward_funcs": [len_reward]} | given)


CONFIG = {
    "dynamic_sampling": True,
    "top_k": 20,
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 2,
    "log_completions": True,
}


@pytest.mark.vllm
@pytest.mark.xdist_group("dynamic sampling")
def test_a_trainer_fills_its_batches_and_resumes(train, tmp_path):
    """Three of eight kinds of prompt always get the reward 0; two updates per rollout."""
    given = ["--useless", "3", CONFIG]
    uninterrupted = [tmp_path / "whole", *given]
    # It starts at the second rollout, which draws its replacements after those of the first.
    continued = [tmp_path / "resumed", *given, "--resume", tmp_path / "whole" / "checkpoint-2"]
    whole, resumed = train(uninterrupted, continued)
    rollouts = [row for row in whole["history"] if "reward" in row]
    assert len(rollouts) == 3
    for row in rollouts:
        assert row["dynamic_sampling/filled_share"] == 1.0
        assert row["frac_reward_zero_std"] == 0.0, "a group without advantages was trained on"
        assert row["mismatch/kl_k3"] < 0.01, "scored over the tokens of other completions"
    assert any(row["dynamic_sampling/discarded_share"] > 0 for row in rollouts)
    assert any(row["dynamic_sampling/unfiltered_reward"] < row["reward"] for row in rollouts)
    for step in (3, 4, 5, 6):
        assert metrics_by_step(resumed)[step] == metrics_by_step(whole)[step]
