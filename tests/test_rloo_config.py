"""QuRLRLOOConfig: its defaults, what it refuses and what it advises, and an RLOOConfig in its
place.
"""

import dataclasses
import re
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"objective": "acr"},
            "objective is 'acr', but must be one of 'tis', 'decoupled', 'quantized_ratio', "
            "'naive', 'trl'",
        ),
        ({"objective": "rloo"}, "objective is 'rloo', but must be one of 'tis'"),
        (
            {"importance_cap": 0.0},
            "importance_cap is 0.0, but must be a ratio above 0, or None for no cap",
        ),
        ({"weight_sync": "nccl"}, "weight_sync is 'nccl', but must be one of"),
        ({"num_generations": 1}, "RLOO requires at least 2 generations per prompt"),
    ],
)
def test_refusals_name_the_setting_and_the_way_out(settings, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        config(tmp_path, **settings)


def test_another_objective_that_lifts_bounds_is_refused_as_well(tmp_path, monkeypatch):
    lifting = Objective("mine", "a test", correction="truncated", lifts_upper_bound=True)
    monkeypatch.setitem(OBJECTIVES, "mine", lifting)
    with pytest.raises(
        ValueError, match="objective is 'mine', but must be one of 'tis', 'decoupled', .*'trl'"
    ):
        config(tmp_path, objective="mine")


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
