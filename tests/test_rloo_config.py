"""QuRLRLOOConfig: its defaults, what it refuses and what it advises, and an RLOOConfig in its
place.
"""

import dataclasses
import warnings

import pytest
from datasets import Dataset
from tiny import tiny_model, tiny_tokenizer
from trl import GRPOConfig, RLOOConfig

from trl_qurl import QuRLGRPOConfig, QuRLRLOOConfig, QuRLRLOOTrainer
from trl_qurl.config import QuantizedRolloutsConfig
from trl_qurl.objective import OBJECTIVES, Objective

PLAIN = {"use_cpu": True, "bf16": False, "report_to": []}


def config(tmp_path, **settings):
    return QuRLRLOOConfig(str(tmp_path), **PLAIN | settings)


def fields(cls):
    return {field.name for field in dataclasses.fields(cls)}


def test_only_the_objective_is_new_and_the_rest_is_trls(tmp_path):
    assert fields(QuRLRLOOConfig) - fields(RLOOConfig) - fields(QuantizedRolloutsConfig) == {
        "objective"
    }
    seen, theirs = config(tmp_path), RLOOConfig(str(tmp_path), **PLAIN)
    assert (seen.objective, seen.importance_cap) == ("tis", 2.0)
    assert (seen.use_vllm, seen.rollout_quantization, seen.updates_per_rollout) == (True, "int8", 1)
    for name in ("beta", "epsilon", "num_generations", "learning_rate", "normalize_advantages"):
        assert getattr(seen, name) == getattr(theirs, name)


@pytest.mark.parametrize("objective", [*sorted(OBJECTIVES.keys() - {"acr"}), "trl"])
def test_every_objective_that_bounds_no_single_token(objective, tmp_path):
    assert config(tmp_path, objective=objective).objective == objective


def test_objectives_that_lift_the_bounds_of_single_tokens_are_refused(tmp_path, monkeypatch):
    lifting = Objective("mine", "a test", correction="truncated", lifts_upper_bound=True)
    monkeypatch.setitem(OBJECTIVES, "mine", lifting)
    for name in ("acr", "mine"):
        with pytest.raises(ValueError, match=f"objective is '{name}', .* 'tis', .*'trl'"):
            config(tmp_path, objective=name)


def test_the_settings_of_rollouts_are_checked(tmp_path):
    with pytest.raises(ValueError, match="weight_sync is 'nccl'"):
        config(tmp_path, weight_sync="nccl")


def started(args):
    """What a trainer says that has a prompt too few for a rollout: the config is fine by then."""
    QuRLRLOOTrainer(
        tiny_model(),
        lambda completions, **kwargs: [0.0] * len(completions),
        args,
        train_dataset=Dataset.from_dict({"prompt": ["ab"]}),
        processing_class=tiny_tokenizer(),
    )


def test_an_rloo_config_is_taken_as_it_is(tmp_path):
    theirs = RLOOConfig(str(tmp_path), num_generations=2, per_device_train_batch_size=4, **PLAIN)
    with (
        warnings.catch_warnings(),
        pytest.raises(ValueError, match="train_dataset has 1 prompts, but a rollout"),
    ):
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "TRL currently supports vLLM")  # of vLLM 0.32
        started(theirs)


def test_a_config_of_another_algorithm_is_not(tmp_path):
    for other in (
        GRPOConfig(str(tmp_path), **PLAIN),
        QuRLGRPOConfig(str(tmp_path), objective="tis", **PLAIN),
    ):
        with pytest.raises(
            TypeError, match=r"lacks settings of QuRLRLOOTrainer: pass a trl_qurl\.QuRLRLOOConfig"
        ):
            started(other)
