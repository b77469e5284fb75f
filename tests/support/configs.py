"""Settings that any machine can run."""

from dataclasses import fields

import pytest
from trl import GRPOConfig

from trl_qurl import QuRLGRPOConfig

PLAIN = {"use_cpu": True, "bf16": False, "report_to": []}
"""What any machine can do, whatever it has."""
if "activation_checkpointing" in {field.name for field in fields(GRPOConfig)}:
    # transformers from 5.23 on warns of the name by which TRL sets it
    PLAIN["activation_checkpointing"] = True

SEVERAL_UPDATES = {"steps_per_generation": 4, "gradient_accumulation_steps": 1}
"""Four updates per rollout: the objective acts, and nothing is warned of."""


def config(**settings):
    return QuRLGRPOConfig("out", **PLAIN | SEVERAL_UPDATES | settings)


def refusal(kind, **settings):
    """What a config says that cannot be made."""
    with pytest.raises(ValueError) as error:
        kind("out", **PLAIN | SEVERAL_UPDATES | settings)
    return str(error.value)
