"""QuRLPPOConfig: what it takes over and refuses, and what one completion per prompt leaves on."""

import pytest
from support.configs import PLAIN, SEVERAL_UPDATES, limited, refusal
from trl import GRPOConfig

from trl_qurl import QuRLGRPOConfig, QuRLPPOConfig
from trl_qurl.config.checks.conflicts import WITH_A_CRITIC


def config(**settings):
    return QuRLPPOConfig("out", **PLAIN | SEVERAL_UPDATES | settings)


def test_defaults_are_those_of_the_papers_framework():
    seen = config()
    assert (seen.gamma, seen.gae_lambda, seen.value_clip_range) == (1.0, 1.0, 0.5)
    assert (seen.critic_learning_rate, seen.critic_warmup_steps) == (1e-5, 0)
    assert seen.max_grad_norm == 1.0
    assert (seen.num_generations, seen.rollout_quantization, seen.objective) == (1, "int8", "acr")


@pytest.mark.parametrize("generations", [1, 2, 3])
def test_any_number_of_generations_from_one_up(generations):
    seen = config(num_generations=generations, per_device_train_batch_size=3)
    assert seen.num_generations == generations and seen.generation_batch_size == 12
    copied = QuRLPPOConfig(**{**seen.to_dict(), "generation_batch_size": None})
    assert copied.num_generations == generations


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_generations": 3}, "divisible by num_generations"),
        ({"generation_batch_size": 6, "steps_per_generation": None}, "divisible by the global"),
        ({"generation_batch_size": 8}, "can not be both configured"),
        ({"vllm_importance_sampling_clip_min": 3.0}, "clip_min (3.0)"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"objective": "ppo"}, "objective is 'ppo'"),
    ],
)
def test_the_parents_other_checks_stay_on(settings, named):
    assert named in refusal(QuRLPPOConfig, per_device_train_batch_size=4, **settings)


def test_trl_itself_refuses_one_generation():
    """The only check that one generation per prompt has to get past; without it, our way around it
    can go.
    """
    assert "at least 2 generations per prompt" in refusal(GRPOConfig, num_generations=1)


# A setting, a value that it cannot have, and what the message names as allowed.
VALUES = [
    ("gamma", 1.1, "[0, 1]"),
    ("gae_lambda", -0.1, "[0, 1]"),
    ("critic_learning_rate", 0.0, "positive"),
    ("critic_warmup_steps", -1, "0 or more"),
    ("value_clip_range", 0.0, "positive"),
    ("loss_type", "cispo", "'dapo'"),
    ("importance_sampling_level", "sequence", "'token'"),
    ("dynamic_sampling", True, "False"),
    ("scale_rewards", "group", "'none', False"),
    ("multi_objective_aggregation", "normalize_then_sum", "'sum_then_normalize'"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), VALUES)
def test_a_value_that_is_refused_is_named_with_what_is_allowed(name, value, allowed):
    message = refusal(QuRLPPOConfig, **{name: value})
    assert name in message and repr(value) in message and allowed in message


def test_every_limit_is_tried():
    of_the_critic = limited(QuRLPPOConfig) - limited(QuRLGRPOConfig)
    assert of_the_critic | WITH_A_CRITIC.keys() == {name for name, *_ in VALUES}


def test_a_reward_that_decides_about_groups_is_refused():
    assert "dynamic_sampling is True" in refusal(QuRLPPOConfig, dynamic_sampling_reward="length")


def test_settings_that_are_fine():
    config(value_clip_range=None, scale_rewards=False, beta=0.001)
