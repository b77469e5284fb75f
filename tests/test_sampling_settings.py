"""Sampling settings: what makes the importance ratio wrong is warned of, and what cannot train is
refused.
"""

import json
import warnings
from dataclasses import dataclass

import pytest
from support.configs import PLAIN, SEVERAL_UPDATES
from trl.experimental.gmpo import GMPOConfig

from trl_qurl import QuRLGRPOConfig, QuRLPPOConfig, QuRLRLOOConfig
from trl_qurl.config import QuantizedRolloutsConfig


def warned(kind=QuRLGRPOConfig, **settings):
    """What is warned of; the warning names the line that made the config."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kind("out", **PLAIN | SEVERAL_UPDATES | settings)
    found = [warning for warning in caught if "importance ratio" in str(warning.message)]
    assert len(found) <= 1
    assert kind is QuRLPPOConfig or all(warning.filename == __file__ for warning in found)
    return str(found[0].message) if found else ""


@pytest.mark.parametrize("kind", [QuRLGRPOConfig, QuRLPPOConfig, QuRLRLOOConfig])
@pytest.mark.parametrize(
    "harmless",
    [
        {},
        {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "temperature": 0.7},
        {"top_k": -1, "min_p": None},
        {"generation_kwargs": {"top_k": -1, "temperature": 1.0}},
        {
            "generation_kwargs": {
                "presence_penalty": 0.0,
                "logit_bias": None,
                "min_tokens": 0,
                "bad_words": [],
            }
        },
        {
            "generation_kwargs": {
                "include_stop_str_in_output": True,
                "ignore_eos": True,
                "max_tokens": 3,
            }
        },
        {"top_p": 0.9, "generation_kwargs": {"top_p": 1.0}},  # the override wins
    ],
)
def test_harmless_settings_are_not_warned_of(kind, harmless):
    assert warned(kind, **harmless) == ""


@pytest.mark.parametrize("kind", [QuRLGRPOConfig, QuRLPPOConfig, QuRLRLOOConfig])
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"top_p": 0.9}, "top_p=0.9: "),
        ({"top_k": 20, "min_p": 0.05}, "top_k=20, min_p=0.05: "),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1: "),
        (
            {"generation_kwargs": {"top_k": 5}, "top_p": 0.5},
            "top_p=0.5, generation_kwargs['top_k']=5: ",
        ),
        ({"generation_kwargs": json.dumps({"min_p": 0.1})}, "generation_kwargs['min_p']=0.1: "),
        ({"top_p": 0.9, "generation_kwargs": {"top_p": 0.8}}, "generation_kwargs['top_p']=0.8: "),
        ({"generation_kwargs": {"temperature": 0.5}}, "generation_kwargs['temperature']=0.5: "),
        ({"generation_kwargs": {"temperature": 0.0}}, "generation_kwargs['temperature']=0.0: "),
        ({"vllm_structured_outputs_regex": "[0-9]{4}"}, "vllm_structured_outputs_regex=[0-9]{4}: "),
        (
            {"generation_kwargs": {"structured_outputs": {"regex": "a"}}},
            "generation_kwargs['structured_outputs']={",
        ),
        (
            {"generation_kwargs": {"presence_penalty": 1.5}},
            "generation_kwargs['presence_penalty']=1.5: ",
        ),
        (
            {"generation_kwargs": {"frequency_penalty": 1}},
            "generation_kwargs['frequency_penalty']=1: ",
        ),
        (
            {"generation_kwargs": {"logit_bias": {20: 4.0}}},
            "generation_kwargs['logit_bias']={20: 4.0}: ",
        ),
        (
            {"generation_kwargs": {"allowed_token_ids": [2]}},
            "generation_kwargs['allowed_token_ids']=[2]: ",
        ),
        (
            {"generation_kwargs": {"bad_words": ["a"], "min_tokens": 2}},
            "generation_kwargs['bad_words']=['a'], gener",
        ),
        ({"generation_kwargs": {"of_a_later_vllm": 1}}, "generation_kwargs['of_a_later_vllm']=1: "),
    ],
)
def test_settings_are_named_with_the_way_out(kind, settings, named):
    message = warned(kind, **settings)
    assert message.startswith(named)
    assert "Set top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0" in message


@pytest.mark.parametrize("kind", [QuRLGRPOConfig, QuRLPPOConfig, QuRLRLOOConfig])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"generation_kwargs": {"n": 2}},
            "generation_kwargs sets n=2, but num_generations is the number",
        ),
        (
            {"generation_kwargs": {"seed": 0}},
            "sets seed=0, but all completions of a colocated group would be the same",
        ),
        (
            {"generation_kwargs": {"logprobs": 3}},
            "sets logprobs=3, but TRL would read another token's log-prob",
        ),
        (
            {"generation_kwargs": {"logprob_token_ids": [3]}},
            r"sets logprob_token_ids=\[3\], but TRL would read",
        ),
        ({"temperature": 0.0}, "temperature is 0.0, but must be positive and finite"),
        ({"temperature": -1.0}, "temperature is -1.0, but must be positive"),
        ({"max_completion_length": 0}, "max_completion_length is 0, but must be at least 1 token"),
        (
            {"max_completion_length": -5},
            "max_completion_length is -5, but must be at least 1 token",
        ),
        (
            {"generation_kwargs": {"stop": ["\n"]}, "mask_truncated_completions": True},
            "mask_truncated_completions=True takes completions without an end-of-sequence token "
            "for truncated",
        ),
        (
            {"generation_kwargs": {"stop_token_ids": [5]}, "mask_truncated_completions": True},
            "mask_truncated_compl",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        kind("out", **PLAIN | SEVERAL_UPDATES | settings)


def test_a_critic_does_not_estimate_what_would_follow_a_stop_string():
    stops = PLAIN | SEVERAL_UPDATES | {"generation_kwargs": {"stop": "."}}
    with pytest.raises(
        ValueError,
        match="gamma=1.0 takes completions without an end-of-sequence token for truncated",
    ):
        QuRLPPOConfig("out", **stops)
    assert warned(QuRLPPOConfig, **stops, gamma=0.0) == warned(QuRLGRPOConfig, **stops) == ""


def test_a_completion_may_be_as_long_as_the_context():
    assert QuRLGRPOConfig("out", **PLAIN | SEVERAL_UPDATES | {"max_completion_length": None})


def test_a_config_without_an_objective_is_warned_as_well():
    @dataclass
    class Other(QuantizedRolloutsConfig, GMPOConfig):
        """As a project of somebody else may have it."""

    with pytest.warns(
        UserWarning,
        match="importance ratio is therefore wrong .* and so are the mismatch/. metrics",
    ):
        Other("out", **PLAIN | SEVERAL_UPDATES | {"top_p": 0.9})
