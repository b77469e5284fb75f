"""The warning about sampling settings that make the importance ratio wrong."""

import json
import warnings
from dataclasses import dataclass

import pytest
from test_config import PLAIN, SEVERAL_UPDATES
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
        {"generation_kwargs": {"seed": 0, "top_k": -1, "temperature": 1.0}},
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
        ({"generation_kwargs": {"top_k": 5}, "top_p": 0.5}, "top_p=0.5, generation_kwargs['top_k']=5: "),
        ({"generation_kwargs": json.dumps({"min_p": 0.1})}, "generation_kwargs['min_p']=0.1: "),
        ({"top_p": 0.9, "generation_kwargs": {"top_p": 0.8}}, "generation_kwargs['top_p']=0.8: "),
        ({"generation_kwargs": {"temperature": 0.5}}, "generation_kwargs['temperature']=0.5: "),
    ],
)
def test_settings_are_named_with_the_way_out(kind, settings, named):
    message = warned(kind, **settings)
    assert message.startswith(named)
    assert "Set top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0" in message


def test_a_config_without_an_objective_is_warned_as_well():
    @dataclass
    class Other(QuantizedRolloutsConfig, GMPOConfig):
        """As a project of somebody else may have it."""

    with pytest.warns(UserWarning, match="importance ratio is therefore wrong .* and so are the mismatch/. metrics"):
        Other("out", **PLAIN | SEVERAL_UPDATES | {"top_p": 0.9})
