"""QuRLPPOConfig: what it takes over and refuses, and what one completion per prompt leaves on."""

import re

import pytest
from trl import GRPOConfig

from trl_qurl import QuRLPPOConfig
from trl_qurl.config.refusals import CRITIC_NUMBERS, WITH_A_CRITIC

# Several updates per rollout avoid the warning about objectives without effect.
SETTINGS = {
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 4,
    "steps_per_generation": 2,
}


def config(tmp_path, **settings):
    return QuRLPPOConfig(str(tmp_path), **SETTINGS | settings)


def test_defaults_are_those_of_the_papers_framework(tmp_path):
    seen = config(tmp_path)
    assert (seen.gamma, seen.gae_lambda, seen.value_clip_range) == (1.0, 1.0, 0.5)
    assert (seen.critic_learning_rate, seen.max_grad_norm) == (1e-5, 1.0)
    assert (seen.num_generations, seen.rollout_quantization, seen.objective) == (1, "int8", "acr")


@pytest.mark.parametrize("generations", [1, 2, 3, 8])
def test_any_number_of_generations_from_one_up(tmp_path, generations):
    seen = config(tmp_path, num_generations=generations, per_device_train_batch_size=12)
    assert seen.num_generations == generations and type(seen.num_generations) is int
    assert (
        QuRLPPOConfig(**{**seen.to_dict(), "generation_batch_size": None}).num_generations
        == generations
    )


def test_an_odd_batch_is_allowed(tmp_path):
    assert (
        config(
            tmp_path, per_device_train_batch_size=3, steps_per_generation=3
        ).generation_batch_size
        == 9
    )
    assert (
        config(
            tmp_path, per_device_train_batch_size=1, steps_per_generation=2
        ).generation_batch_size
        == 2
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_generations": 3}, "must be divisible by num_generations"),
        (
            {"num_generations": 1, "generation_batch_size": 6, "steps_per_generation": None},
            "divisible by the global",
        ),
        ({"num_generations": 1, "generation_batch_size": 8}, "can not be both configured"),
        (
            {"num_generations": 1, "vllm_importance_sampling_clip_min": 3.0},
            "clip_min (3.0) must be less than",
        ),
        (
            {"num_generations": 1, "auto_find_batch_size": True},
            "auto_find_batch_size is not supported",
        ),
        ({"num_generations": 1, "objective": "ppo"}, "objective is 'ppo'"),
    ],
)
def test_the_parents_other_checks_stay_on(tmp_path, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config(tmp_path, **settings)


def test_trl_itself_refuses_one_generation(tmp_path):
    # The only check that one generation per prompt has to get past; if it goes, so can our way
    # around it.
    with pytest.raises(ValueError, match="at least 2 generations per prompt"):
        GRPOConfig(str(tmp_path), **SETTINGS, num_generations=1)


# A setting, a value that it cannot have, and what the message names as allowed.
VALUES = [
    ("gamma", 1.1, "[0, 1]"),
    ("gae_lambda", -0.1, "[0, 1]"),
    ("critic_learning_rate", 0.0, "positive"),
    ("critic_warmup_steps", -1, "0"),
    ("value_clip_range", 0.0, "None"),
    ("loss_type", "cispo", "'dapo'"),
    ("importance_sampling_level", "sequence", "'token'"),
    ("dynamic_sampling", True, "False"),
    ("scale_rewards", "group", "'none', False"),
    ("multi_objective_aggregation", "normalize_then_sum", "'sum_then_normalize'"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), VALUES)
def test_a_value_that_is_refused_is_named_with_what_is_allowed(tmp_path, name, value, allowed):
    with pytest.raises(ValueError) as error:
        config(tmp_path, **{name: value})
    message = str(error.value)
    assert name in message and repr(value) in message and allowed in message


def test_every_value_of_the_tables_is_checked():
    assert CRITIC_NUMBERS.keys() | WITH_A_CRITIC.keys() == {name for name, *_ in VALUES}


def test_settings_that_are_fine(tmp_path):
    config(tmp_path, value_clip_range=None, scale_rewards=False, beta=0.001)
