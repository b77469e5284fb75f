"""Examples and commands, run as users run them for two steps of
a tiny model with random weights.
"""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import completed
from documents import ROOT, blocks, new_side
from support.questions import write_questions
from tiny import ENGINE, save_tiny
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from trl_qurl.quantization.storage import read_tensors

pytestmark = pytest.mark.vllm

BIN = Path(sys.executable).parent
EXAMPLES = ROOT / "examples"
SETTINGS = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,
    "max_completion_length": 8,
    "report_to": "none",
    "uaq_scale": 1.5,
    "vllm_max_model_length": 1024,
    "vllm_engine_kwargs": ENGINE,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A saved model and tokenizer, as the Hub would give them."""
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return save_tiny(tmp_path_factory.mktemp("model"), template, max_position_embeddings=1024)


def run(command, settings, directory):
    """Train with these settings in a YAML file, and return the process."""
    (directory / "run.yaml").write_text(yaml.safe_dump(SETTINGS | settings))
    command = [*command, "--config", directory / "run.yaml", "--output_dir", directory / "policy"]
    return completed(*command, cwd=directory, VLLM_LOGGING_LEVEL="ERROR")


def assert_trained(directory, start, steps):
    assert (directory / "policy" / f"checkpoint-{steps}" / "trainer_state.json").exists()
    policy = AutoModelForCausalLM.from_pretrained(directory / "policy", dtype="float32")
    assert policy.config.uaq_scale == 1.5
    # It is the full-precision policy that is saved, and with UAQ it is still the function it was.
    assert {tensor.dtype for _, tensor in read_tensors(directory / "policy")} == {torch.float32}
    tokenizer = AutoTokenizer.from_pretrained(directory / "policy")
    tokens = tokenizer("Half of 48?", return_tensors="pt")
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(start)(**tokens).logits
        torch.testing.assert_close(policy(**tokens).logits, expected, rtol=1e-4, atol=1e-4)


# as in GSM8K
ANSWERS = [f"It is.\n#### {number}" for number in range(1, 9)]


@pytest.fixture
def hub(model, tmp_path):
    """The scripts' model and data, as local directories that have their names."""
    (tmp_path / "Qwen").mkdir()
    for size in ("0.5B", "7B"):
        (tmp_path / "Qwen" / f"Qwen2.5-{size}-Instruct").symlink_to(model)
    data = tmp_path / "openai" / "gsm8k"
    data.mkdir(parents=True)
    write_questions(data / "train.jsonl", ANSWERS)
    (data / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files: train.jsonl\n---\n"
    )
    data = tmp_path / "trl-lib" / "DeepMath-103K"
    data.mkdir(parents=True)
    row = {"prompt": [{"role": "user", "content": "What is 1 + 1?"}], "solution": "$2$"}
    (data / "train.jsonl").write_text(8 * (json.dumps(row) + "\n"))


# No update: rewards are 0 for a random model, unless luck has it.
ON_CPU = {"use_cpu": True, "bf16": False, "learning_rate": 0.0, "max_steps": 2}


def run_block(python, block, given, settings, directory, **environment):
    """Run the code of a page, with some lines of its settings replaced."""
    replaced = ""
    for key, value in settings.items():
        replaced += f"{key}={value!r}, "
    code, count = re.subn(given, replaced, block.code)
    assert count == 1
    return completed(python, "-c", code, cwd=directory, VLLM_LOGGING_LEVEL="ERROR", **environment)


def test_two_steps_of_the_grpo_script(model, hub, warm_python, tmp_path):
    run([warm_python, EXAMPLES / "gsm8k_grpo.py"], ON_CPU, tmp_path)
    assert_trained(tmp_path, model, steps=2)


def test_the_code_of_the_readme_trains(hub, warm_python, tmp_path):
    [change] = blocks(ROOT / "README.md", "diff")
    settings = SETTINGS | ON_CPU | {"max_steps": 1, "uaq_scale": 1.0}
    run_block(warm_python, new_side(change), "max_completion_length=1024", settings, tmp_path)
    assert (tmp_path / "policy" / "checkpoint-1" / "trainer_state.json").exists()


def test_the_code_of_the_tutorial_trains_and_evaluates(model, warm_python, tmp_path):
    settings = {"vllm_max_model_length": 1024, "vllm_engine_kwargs": ENGINE}
    settings |= {"bf16": False, "max_steps": 4}
    [block] = blocks(ROOT / "docs" / "tutorial.md", "python")
    done = run_block(warm_python, block, "max_steps=80,", settings, tmp_path, MODEL=str(model))
    assert re.search(r"^held out: 0\.\d\d -> 0\.\d\d$", done.stdout, re.MULTILINE)
    saved = tmp_path / "policy" / "model.safetensors"
    assert saved.exists(), "what the page quantizes and serves"


def test_two_steps_of_the_ppo_script_with_accelerate_launch(model, hub, warm_python, tmp_path):
    launcher = [warm_python, BIN / "accelerate", "launch", "--num_processes", "1", "--cpu"]
    run([*launcher, EXAMPLES / "gsm8k_ppo.py"], ON_CPU | {"num_generations": 1}, tmp_path)
    assert_trained(tmp_path, model, steps=2)
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "policy" / "critic")
    assert critic.config.num_labels == 1


def test_the_command_with_a_settings_file_and_own_questions(model, warm_python, tmp_path):
    """Works without a GPU and without use_cpu or bf16 in the settings."""
    settings = {
        "model_name_or_path": str(model),
        "dataset": write_questions(tmp_path / "questions.jsonl", ANSWERS),
        "max_steps": 1,
        "learning_rate": 0.0,
        "rollout_quantization": "none",
    }
    printed = run([warm_python, BIN / "trl-qurl", "grpo"], settings, tmp_path)
    assert f"trl-qurl report {tmp_path / 'policy'}" in printed.stdout
    # eager; no bar
    assert "INFO: Starting vLLM.\n" in printed.stderr
    assert not re.search("Writing model shards|checkpoint shards", printed.stderr)
    on_the_cpu = not torch.accelerator.is_available()
    assert printed.stderr.count("No accelerator found: training on the CPU") == on_the_cpu
    assert_trained(tmp_path, model, steps=1)
