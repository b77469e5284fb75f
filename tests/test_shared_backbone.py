"""A value head on the policy: its gradient through the policy's backward pass is that of one graph for both."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from tiny import tiny_model
from transformers import get_scheduler

from trl_qurl import QuRLPPOConfig
from trl_qurl.trainers.critic.critic import build_optimizer
from trl_qurl.trainers.critic.shared_backbone import SharedBackboneCritic, check_shared

P, T = 4, 3
BATCH = {"completion_ids": torch.zeros(2, T)}
IDS = torch.tensor([[40, 50, 60, 70, 41, 51, 61], [0, 42, 52, 62, 72, 43, 53]])
TARGET = torch.tensor([[0.3, -0.2, 0.5, 0.1], [0.7, 0.0, -0.4, 0.2]])  # (B, T + 1)


def squared_error(values):
    return (values - TARGET).square().mean()


@pytest.fixture
def args(tmp_path):
    return QuRLPPOConfig(str(tmp_path), share_backbone=True, use_cpu=True, bf16=False, steps_per_generation=2)


def shared_critic(policy, args):
    critic = SharedBackboneCritic(policy, args, Accelerator(cpu=True))
    torch.nn.init.normal_(critic.model.weight)
    critic.prepare(
        lambda model: build_optimizer(model, args, decayed=set()),
        lambda optimizer: get_scheduler("constant", optimizer),
    )
    return critic


@pytest.mark.parametrize("lora", [False, True])
def test_gradients_are_those_of_one_graph(lora, args):
    policy = tiny_model()
    if lora:
        policy = get_peft_model(policy, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    critic = shared_critic(policy, args)
    head = critic.model

    with critic.watching() as passes:
        policy_loss = policy(input_ids=IDS).logits.log_softmax(-1)[..., 5].mean()
    loss = critic.add_to_policy_loss(policy_loss, BATCH, passes, squared_error)
    loss.backward()
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    seen = [parameter.grad.clone() for parameter in (*trained, *head.parameters())]

    for parameter in (*trained, *head.parameters()):
        parameter.grad = None
    outputs = policy(input_ids=IDS, output_hidden_states=True)
    values = head(outputs.hidden_states[-1]).squeeze(-1)[:, -(T + 1) :]
    value_loss = args.value_loss_coef * squared_error(values)
    (outputs.logits.log_softmax(-1)[..., 5].mean() + value_loss).backward()
    expected = [parameter.grad for parameter in (*trained, *head.parameters())]
    torch.testing.assert_close(seen, expected, rtol=1e-3, atol=5e-6)
    assert loss.item() == pytest.approx((policy_loss + value_loss).item(), rel=1e-5)


def test_values_of_a_rollout_are_those_of_the_pass_that_was_watched(args):
    policy = tiny_model()
    critic = shared_critic(policy, args)
    with torch.no_grad():
        policy(input_ids=IDS)  # not watched: the probe of a sync, say
        with critic.watching() as seen:
            for chunk in IDS.split(1):
                policy(input_ids=chunk)
        with critic.watching():  # the reference's pass
            policy(input_ids=IDS.flip(1))
        expected = critic.model(policy.base_model(input_ids=IDS).last_hidden_state).squeeze(-1)[:, -(T + 1) :]
        torch.testing.assert_close(critic.rollout_values(BATCH, 8, seen), expected, rtol=1e-4, atol=1e-6)


def test_a_saved_head_comes_back_and_another_width_is_refused(args, tmp_path):
    critic = shared_critic(tiny_model(), args)
    critic.save_pretrained(tmp_path / "critic", tokenizer=None)
    saved, accelerator = str(tmp_path / "critic"), Accelerator(cpu=True)
    other = SharedBackboneCritic(tiny_model(), args, accelerator, saved)
    assert critic.model.weight.any() and torch.equal(other.model.weight, critic.model.weight)
    with pytest.raises(ValueError, match="was trained on a backbone of another width"):
        SharedBackboneCritic(tiny_model(hidden_size=64), args, accelerator, saved)
    with pytest.raises(FileNotFoundError, match=r"holds no value_head.safetensors: pass a directory that has one"):
        SharedBackboneCritic(tiny_model(), args, accelerator, str(tmp_path))


def test_the_policy_does_not_hold_its_critic(args):
    policy = tiny_model()
    critic = shared_critic(policy, args)
    with critic.watching():
        policy(input_ids=IDS)
    gone = weakref.ref(critic)
    del critic
    assert gone() is None, "the policy keeps its critic, and both keep what either holds"


def test_two_loss_scales_in_one_backbone_are_refused():
    with pytest.raises(ValueError, match="does not work with fp16=True.*use bf16=True, or share_backbone=False"):
        check_shared(SimpleNamespace(fp16=True), None, None)
