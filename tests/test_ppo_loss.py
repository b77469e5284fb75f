"""PPO's policy gradient on real rollouts: REINFORCE, and the plain PPO loss, where it must reduce
to them.
"""

import pytest
import torch
from datasets import Dataset
from support import losses
from support.losses import SETTINGS, gradients
from tiny import save_tiny

from trl_qurl import QuRLPPOConfig, QuRLPPOTrainer
from trl_qurl.advantages import (
    bootstrap_values,
    generalized_advantages,
    masked_moments,
    token_rewards,
    whiten,
)

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("trainer")]

B, T, CAP = 6, 8, 1.0005  # this cap cuts some of the ratios of INT8 rollouts, all close to 1


def lengths(completions, **kwargs):
    return [len(set(completion)) / 4 - 1 for completion in completions]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("int8")
    save_tiny(directory / "model")
    config = QuRLPPOConfig(
        str(directory / "out"),
        rollout_quantization="int8",
        per_device_train_batch_size=B,
        steps_per_generation=2,
        max_completion_length=T,
        importance_cap=CAP,
        sync_check_interval=0,
        gradient_checkpointing=False,
        **SETTINGS,
    )
    prompts = Dataset.from_dict({"prompt": ["ab", "cde", "ef", "ghi j", "k", "l 2"] * 4})
    trainer = QuRLPPOTrainer(str(directory / "model"), lengths, config, prompts)  # in TRL's order
    trainer.current_gradient_accumulation_steps = 2
    return losses.ready(trainer)


def rollout(trainer):
    """A real rollout, in two micro-batches."""
    prompts = [{"prompt": prompt} for prompt in trainer.train_dataset["prompt"][: 2 * B]]
    return trainer._generate_and_score_completions(prompts)


def test_with_a_zero_critic_the_gradient_is_reinforce(trainer):
    batch = rollout(trainer)
    assert not batch["values"].any(), "a new head starts at zero"
    # The table of completions shows advantages before whitening: rewards, with a critic that is 0
    # everywhere.
    rewards = trainer._rollout.rewards
    assert list(trainer._logs["advantages"]) == pytest.approx(rewards[:, 0].tolist())
    assert "frac_reward_zero_std" not in trainer._metrics["train"]
    inputs = losses.micro_batch(batch, slice(B))
    seen = gradients(trainer, losses.our_loss(trainer, inputs))

    mask = inputs["completion_mask"]
    rho = (inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"]).exp()
    is_cut = rho[mask.bool()] > CAP
    assert is_cut.any() and not is_cut.all(), "the cap cuts all or nothing"
    rewards = rewards.expand_as(batch["completion_mask"])  # of one function
    learned = rewards[batch["completion_mask"].bool()]
    advantages = (rewards[:B] - learned.mean()) / learned.std()
    reinforce = rho.clamp(max=CAP) * advantages * losses.logps_of(trainer, inputs) * mask
    # Each of the two micro-batches is its share of the mean over all tokens of the rollout.
    expected = gradients(trainer, -reinforce.sum() / batch["num_items_in_batch"])
    losses.assert_close(seen, expected, rtol=1e-3, atol=1e-4)


def test_the_critic_learns_from_tokens_with_a_return_only(trainer):
    batch = losses.micro_batch(rollout(trainer), slice(B))
    batch["critic_mask"][0] = False  # a completion without a reward
    values = torch.full((B, T + 1), 9.0, requires_grad=True)  # far from every return
    trainer._value_loss(batch, values).backward()
    assert torch.equal(values.grad[:, :-1] != 0, batch["critic_mask"])
    assert not values.grad[:, -1].any(), "the value after the last token is not a prediction"


def test_values_are_those_before_each_token(trainer):
    batch = rollout(trainer)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    score = trainer.critic.model.score
    with torch.no_grad():
        score.weight.normal_()
        seen = trainer.critic.rollout_values(batch, batch_size=4)
        # By the definition: run the critic on the text so far, token by token.
        start = batch["prompt_ids"].size(1)
        for t in range(T + 1):
            so_far = trainer.critic.model(
                input_ids=ids[:, : start + t], attention_mask=mask[:, : start + t]
            )
            alive = mask[:, start + t - 1].bool()
            torch.testing.assert_close(
                seen[alive, t], so_far.logits[alive, -1, 0], rtol=1e-4, atol=1e-5
            )
        score.weight.zero_()


def test_advantages_are_whitened_over_the_whole_rollout(trainer, monkeypatch):
    batch = rollout(trainer)
    nan = torch.nan
    functions = torch.tensor([[1.0, 2.0], [1.0, nan], [nan, nan]]).repeat(4, 1)
    monkeypatch.setattr(trainer._rollout, "rewards", functions)
    monkeypatch.setattr(trainer, "reward_weights", torch.tensor([1.0, 0.5]))
    values = torch.randn(len(functions), T + 1)
    trainer._add_advantages(batch, values)
    # 1 + 2 / 2, then 1. Nothing is learned from the third.
    rewards = torch.tensor([2.0, 1.0, 0.0]).repeat(4)
    mask = batch["completion_mask"].bool() & (rewards > 0).unsqueeze(1)
    assert torch.equal(batch["critic_mask"], mask)
    ends = [*trainer.eos_token_ids, trainer.processing_class.pad_token_id]
    plain = generalized_advantages(
        token_rewards(rewards, mask),
        values[:, :-1],
        bootstrap_values(values, batch["completion_ids"], batch["completion_mask"], ends),
        mask,
        1.0,
        1.0,
    )
    expected = whiten(plain.advantages, mask, masked_moments(plain.advantages, mask))
    torch.testing.assert_close(batch["advantages"], expected)
    torch.testing.assert_close(batch["returns"], plain.returns)
    for name, values in (
        ("advantages/std", plain.advantages),
        ("critic/returns_std", plain.returns),
    ):
        spread = values[mask].std().item()
        assert trainer._metrics["train"][name][-1] == pytest.approx(spread, rel=1e-4)


def test_evaluation_measures_the_critic_and_changes_nothing(trainer):
    before = [parameter.detach().clone() for parameter in trainer.critic.model.parameters()]
    held_out = Dataset.from_dict({"prompt": ["ab", "cde", "ef", "ghi j"] * 2})
    metrics = trainer.evaluate(held_out)
    trainer.model.train()
    assert metrics["eval_loss"] == metrics["eval_loss"], "NaN"
    logged = next(row for row in reversed(trainer.state.log_history) if "eval_reward" in row)
    assert {"eval_critic/explained_variance", "eval_advantages/std"} <= logged.keys()
    assert logged["eval_critic/returns_mean"] == pytest.approx(logged["eval_reward"], abs=0.5)
    assert all(map(torch.equal, before, trainer.critic.model.parameters()))
