"""QuRLRLOOConfig: its defaults and what it refuses, and an RLOOConfig in its place."""

import dataclasses

import pytest
from support.building import build
from support.configs import PLAIN, refusal
from trl import RLOOConfig

from trl_qurl import QuRLGRPOConfig, QuRLRLOOConfig, QuRLRLOOTrainer
from trl_qurl.config.rollout import QuantizedRolloutsConfig
from trl_qurl.objective import OBJECTIVES, Objective


def fields(cls):
    return {field.name for field in dataclasses.fields(cls)}


def test_only_the_objective_is_new_and_the_rest_is_trls():
    new = fields(QuRLRLOOConfig) - fields(RLOOConfig) - fields(QuantizedRolloutsConfig)
    assert new == {"objective"}
    seen = QuRLRLOOConfig("out", **PLAIN)
    theirs = RLOOConfig("out", **PLAIN)
    assert (seen.objective, seen.importance_cap) == ("tis", 2.0)
    assert (seen.use_vllm, seen.rollout_quantization, seen.updates_per_rollout) == (True, "int8", 1)
    for name in ("beta", "epsilon", "num_generations", "learning_rate", "normalize_advantages"):
        assert getattr(seen, name) == getattr(theirs, name)


@pytest.mark.parametrize("objective", [*sorted(OBJECTIVES.keys() - {"acr"}), "trl"])
def test_every_objective_that_bounds_no_single_token(objective):
    assert QuRLRLOOConfig("out", **PLAIN, objective=objective).objective == objective


@pytest.mark.parametrize("name", ["acr", "mine"])
def test_objectives_that_lift_the_bounds_of_single_tokens_are_refused(name, monkeypatch):
    lifting = Objective("mine", "a test", correction="truncated", lifts_upper_bound=True)
    monkeypatch.setitem(OBJECTIVES, "mine", lifting)
    message = refusal(QuRLRLOOConfig, objective=name)
    assert f"objective is '{name}'" in message and "'tis'" in message and "'trl'" in message


def test_the_settings_of_rollouts_are_checked():
    assert "weight_sync is 'nccl'" in refusal(QuRLRLOOConfig, weight_sync="nccl")


@pytest.mark.parametrize("other", [RLOOConfig, QuRLGRPOConfig])
def test_a_config_of_trls_or_of_another_algorithm_is_not_taken(other, tmp_path):
    args = other(str(tmp_path), **PLAIN, steps_per_generation=2)
    with pytest.raises(TypeError, match=rf"{other.__name__}.*QuRLRLOOConfig"):
        build(QuRLRLOOTrainer, tmp_path, args=args)
