"""What a run on several GPUs saves is the whole policy, however
accelerate keeps its checkpoints.
"""

import pytest
import torch
import yaml
from documents import ROOT
from transformers import AutoModelForCausalLM

CONFIGURATIONS = sorted((ROOT / "examples" / "accelerate_configs").glob("*.yaml"))


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_fsdp2_saves_a_policy_that_can_be_loaded(kind, run_scenario, tmp_path):
    record = run_scenario("whole_policy.py", tmp_path, kind, processes=2)
    assert record["kind"].endswith(kind), "the user's choice for checkpoints was not restored"
    assert record["split"].startswith("FSDP"), "the model was whole all the time"
    trained = torch.load(tmp_path / "expected.pt")
    for directory in ("policy", "checkpoint-1"):
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / directory, dtype="float32")
        for name, tensor in trained.items():
            assert torch.equal(saved.state_dict()[name], tensor), f"{name} in {directory}"
    # to resume from
    assert list((tmp_path / "checkpoint-1").glob("pytorch_model_fsdp*"))


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_the_configurations_save_whole_policies(path):
    settings = yaml.safe_load(path.read_text())
    fsdp = settings.get("fsdp_config", {"fsdp_state_dict_type": "FULL_STATE_DICT"})
    assert fsdp["fsdp_state_dict_type"] == "FULL_STATE_DICT"
    assert settings.get("deepspeed_config", {}).get("zero3_save_16bit_model", True)
