"""What a run on several GPUs saves is the whole policy, however accelerate keeps its checkpoints."""

from pathlib import Path

import pytest
import torch
import yaml
from documents import ROOT
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from trl_qurl.trainers.saving import SavingMixin

CONFIGURATIONS = sorted((ROOT / "examples" / "accelerate_configs").glob("*.yaml"))


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_fsdp2_saves_a_policy_that_can_be_loaded(kind, run_scenario, tmp_path):
    record = run_scenario("whole_policy.py", tmp_path, kind, processes=2)
    assert record["kind"].endswith(kind), "the user's choice for checkpoints was not restored"
    assert record["split"].startswith("FSDP"), "the model was whole all the time"
    trained = torch.load(tmp_path / "expected.pt")
    for directory in ("policy", "checkpoint-1"):
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / directory).state_dict()
        for name, tensor in trained.items():
            assert torch.equal(saved[name], tensor), f"{name} in {directory}"
    assert list((tmp_path / "checkpoint-1").glob("pytorch_model_fsdp*")), "nothing is there to resume from"


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_the_configurations_save_whole_policies(path):
    settings = yaml.safe_load(path.read_text())
    assert settings.get("fsdp_config", {}).get("fsdp_state_dict_type", "FULL_STATE_DICT") == "FULL_STATE_DICT"
    assert settings.get("deepspeed_config", {}).get("zero3_save_16bit_model", True)


class Faulty(SavingMixin, Trainer):
    """Saves no weights and says nothing, as DeepSpeed may, or incomplete ones."""

    written: bytes | None = None

    def _save(self, output_dir=None, state_dict=None):
        if self.written is not None:
            Path(output_dir, "model.safetensors").write_bytes(self.written)


def test_weights_that_are_not_there_are_not_called_saved(tmp_path):
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = Faulty(tiny_model(), arguments, processing_class=tiny_tokenizer())
    with pytest.raises(OSError, match="No weights were written to .*zero3_save_16bit_model: true"):
        trainer.save_model()
    trainer.written = b"\x10\x00"
    with pytest.raises(OSError, match=r"model.safetensors cannot be read"):
        trainer.save_model()
