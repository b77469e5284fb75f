"""The examples of docs/architecture.md: a scheme of another package, another trainer, and a check
(the others: test_trainers.py).
"""

import json
import os
from pathlib import Path

import pytest
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from conftest import FORGET_OURS, completed
from documents import ROOT, blocks, extension_examples
from safetensors.torch import load_file
from tiny import save_tiny

EXAMPLES = extension_examples()

USE_IT = """
import json, sys
from transformers import AutoModelForCausalLM
from trl_qurl import QuRLGRPOConfig, cli
from trl_qurl.quantization import write_checkpoint

model, directory = sys.argv[1:]
assert cli.main(["quantize", model, f"{directory}/command", "--scheme", "w6a16"]) == 0
write_checkpoint(AutoModelForCausalLM.from_pretrained(model), None, "w6a16", f"{directory}/function")
config = QuRLGRPOConfig(f"{directory}/run", rollout_quantization="w6a16", use_cpu=True, bf16=False, report_to=[])
print(json.dumps(config.rollout_quantization))
"""


USE_THE_REGISTERED = """
import json
from trl_qurl import QuRLGRPOConfig

config = QuRLGRPOConfig("run", rollout_quantization="w6a16", use_cpu=True, bf16=False, report_to=[])
print(json.dumps(config.rollout_quantization))
"""


DISTILL = """
import json, sys

from made_up import QuantizedDistillationConfig, QuantizedDistillationTrainer
from made_up_check import RepetitionCheck
from scenarios.short_runs import COMMON, texts
from tiny import tiny_model, tiny_tokenizer

class CountedCheck(RepetitionCheck):
    rollouts = 0

    def on_rollout(self, rollout):
        super().on_rollout(rollout)
        self.rollouts += 1


directory = sys.argv[1]
check = CountedCheck()
tiny_model(seed=1).save_pretrained(f"{directory}/teacher")
settings = {name: value for name, value in COMMON.items() if "generation" not in name and name != "logging_steps"}
settings |= {"smooth_activations": None, "logging_steps": 1}
trainer = QuantizedDistillationTrainer(
    tiny_model(),
    f"{directory}/teacher",
    QuantizedDistillationConfig(f"{directory}/run", **settings),
    train_dataset=texts(),
    processing_class=tiny_tokenizer(),
    callbacks=[check],
)
trainer.train()
generation = trainer.vllm_generation
quantization = generation.llm.llm_engine.vllm_config.quant_config
record = {"history": trainer.state.log_history, "checked": check.rollouts, "format": quantization.quant_format}
record |= {"smoothed": len(generation.weights.smoothing.scales), "saved": str(trainer.save_quantized())}
print("RECORD " + json.dumps(record))
"""


@pytest.mark.vllm
def test_a_trainer_of_trls_that_is_not_of_groups(warm_python, tmp_path):
    (tmp_path / "made_up.py").write_text(EXAMPLES["distillation"])
    (tmp_path / "made_up_check.py").write_text(EXAMPLES["check"])
    paths = [str(path) for path in (tmp_path, ROOT, ROOT / "tests")]
    done = completed(warm_python, "-c", DISTILL, tmp_path, PYTHONPATH=os.pathsep.join(paths))
    record = json.loads(done.stdout.split("RECORD ")[1])
    assert record["format"] == "int-quantized"
    assert record["checked"] == 2
    first, second = [row for row in record["history"] if "loss" in row]
    for row in (first, second):  # a rollout each, and each with a sync
        assert row["time/update_s"] > 0
        assert row["time/generate_s"] > 0
        assert row["sync/sent_mb"] > 0
        assert row["throughput/generated_tokens_per_s"] > 0
    # It scores nothing by itself: the first rollout is compared, for a proof.
    assert 0 <= first["mismatch/kl_k3"] < 1e-3
    assert first["mismatch/tokens"] > 0
    assert record["smoothed"] > 0, "smoothing learned from the loss of the first rollout"
    assert (Path(record["saved"]) / "model.safetensors").exists()


@pytest.mark.skipif("W6A16" not in PRESET_SCHEMES, reason="needs compressed-tensors 0.19")
def test_a_scheme_that_is_registered_and_one_of_another_package(warm_python, tmp_path):
    (tmp_path / "my_package.py").write_text(EXAMPLES["scheme"])
    place = {"cwd": tmp_path, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    registered = EXAMPLES["registration"] + USE_THE_REGISTERED
    assert completed(warm_python, "-c", registered, **place).stdout.endswith('"w6a16"\n')
    # as pip would
    metadata = tmp_path / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    [entry_points] = blocks(ROOT / "docs" / "architecture.md", "ini")
    (metadata / "entry_points.txt").write_text(entry_points.code)
    save_tiny(tmp_path / "model")
    command = [warm_python, "-c", FORGET_OURS + USE_IT, tmp_path / "model", tmp_path]
    assert completed(*command, **place).stdout.endswith('"w6a16"\n')
    for way in ("command", "function"):
        config = json.loads((tmp_path / way / "config.json").read_text())["quantization_config"]
        assert config["config_groups"]["group_0"]["weights"]["num_bits"] == 6
        tensors = load_file(tmp_path / way / "model.safetensors")
        # words for 128 inputs
        assert tensors["model.layers.0.mlp.up_proj.weight_packed"].shape == (128, 24)
