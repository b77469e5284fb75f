"""Sampling settings: a warning of what makes the ratio wrong; what cannot train is refused.

Those that cut tokens are followed (`test_listed_tokens.py`).
"""

import json
import warnings
from types import SimpleNamespace

import pytest
from support.configs import PLAIN, SEVERAL_UPDATES, refusal

from trl_qurl import QuRLGRPOConfig, QuRLPPOConfig, QuRLRLOOConfig
from trl_qurl.trainers.engine import QuantizedEngineMixin


def warned(kind=QuRLGRPOConfig, **settings):
    """What is warned of; the warning names the line that made the config."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kind("out", **PLAIN | SEVERAL_UPDATES | settings)
    found = [warning for warning in caught if "importance ratio" in str(warning.message)]
    assert len(found) <= 1
    assert kind is QuRLPPOConfig or all(warning.filename == __file__ for warning in found)
    return str(found[0].message) if found else ""


HARMLESS = [
    {},
    {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "temperature": 0.7},
    {"generation_kwargs": {"temperature": 1.0, "presence_penalty": 0.0, "bad_words": []}},
    {"generation_kwargs": {"include_stop_str_in_output": True, "ignore_eos": True}},
    {"top_k": 20, "min_p": 0.05, "top_p": 0.9, "max_completion_length": None},
    {"generation_kwargs": {"structured_outputs": {"regex": "a"}}},
    {"repetition_penalty": 1.1, "generation_kwargs": {"repetition_penalty": 1.0, "top_p": 0.8}},
]


@pytest.mark.parametrize("settings", HARMLESS, ids=json.dumps)
def test_harmless_settings_are_not_warned_of(settings):
    assert warned(**settings) == ""


# Settings, and what the warning begins with.
NAMED = [
    ({"top_k": 20, "repetition_penalty": 1.1}, "repetition_penalty=1.1: "),
    ({"generation_kwargs": '{"min_tokens": 2}'}, "generation_kwargs['min_tokens']=2: "),
]
OVERRIDES = {
    "temperature": 0.5,
    "logit_bias": {20: 4.0},
    "of_a_later_vllm": 1,
}
NAMED += [
    (
        {"repetition_penalty": 1.1, "generation_kwargs": {name: value}},
        f"repetition_penalty=1.1, generation_kwargs[{name!r}]={value}: ",
    )
    for name, value in OVERRIDES.items()
]


@pytest.mark.parametrize(("settings", "named"), NAMED, ids=json.dumps)
def test_settings_are_named_with_the_way_out(settings, named):
    message = warned(**settings)
    assert message.startswith(named)
    assert "Set repetition_penalty=1.0, also in generation_kwargs" in message


@pytest.mark.parametrize("kind", [QuRLPPOConfig, QuRLRLOOConfig])
def test_every_trainer_warns(kind):
    assert warned(kind, repetition_penalty=1.1).startswith("repetition_penalty=1.1: ")


@pytest.mark.parametrize(
    ("name", "value", "way_out"),
    [
        ("n", 2, "num_generations"),
        ("seed", 0, "seed setting"),
        ("logprobs", 3, "Remove it"),
    ],
)
def test_parameters_that_cannot_work_are_refused(name, value, way_out):
    message = refusal(generation_kwargs={name: value})
    assert f"generation_kwargs sets {name}={value}" in message and way_out in message


def test_a_trainer_that_does_not_score_its_rollouts_does_not_follow():
    args = QuRLGRPOConfig("out", **PLAIN | SEVERAL_UPDATES, top_p=0.9)
    trainer = SimpleNamespace(args=args)
    with pytest.warns(UserWarning, match="top_p=0.9: .*because SimpleNamespace computes them"):
        assert QuantizedEngineMixin._count_listed(trainer) == 0
