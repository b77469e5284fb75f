"""What a run on several GPUs saves is the whole policy, however
accelerate keeps its checkpoints.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM


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
