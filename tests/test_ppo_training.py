"""PPO from start to end with real engines: the critic learns, is saved and resumes, and no engine
sees it.
"""

import re

import pytest
import torch
from safetensors.torch import load_file
from support.training import MOVED, SAME, assert_metrics
from tiny import ENGINE, save_tiny, tiny_classifier, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("ppo")]  # they share runs

PPO_METRICS = """\
advantages/mean
advantages/std
critic/explained_variance
critic/grad_norm
critic/returns_mean
critic/returns_std
critic/value_clip_share
critic/value_loss
time/values_s"""

ONE = {
    "num_generations": 1,
    "critic_learning_rate": 1e-3,
    "beta": 0.0,
}
KINDS = {
    "own": [ONE],
    "LoRA policy": ["--lora", ONE | {"beta": 0.01}],
    "another size": ["--value-model", "smaller", ONE],
    "LoRA critic": ["--critic-lora", ONE],
}
EXPORTED = ["own", "LoRA policy"]
"""Runs that are compared with a fresh engine."""

# Each request has a seed, and the engine is exact, so processes do not matter to what is sampled. One
# batch: shuffling does not matter.
GRADIENT = {
    "rollout_quantization": None,
    "vllm_engine_kwargs": ENGINE | {"dtype": "float32"},
    "num_generations": 1,
    "max_steps": 1,
    "optim": "sgd",
    "shuffle_dataset": False,
    "uaq_scale": 1.0,
    "learning_rate": 1.0,
    "critic_learning_rate": 1.0,
    "max_grad_norm": 0.0,
    "gamma": 0.9,
    "gae_lambda": 0.8,
}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A policy, a smaller model of the same family, and a critic: its head is not zero, so its
    backbone learns.
    """
    directory = tmp_path_factory.mktemp("start")
    save_tiny(directory / "policy")
    save_tiny(directory / "smaller", hidden_size=64, num_hidden_layers=1, seed=3)
    critic = tiny_classifier(seed=5)
    torch.nn.init.normal_(critic.score.weight)
    save_tiny(directory / "critic", model=critic)
    return directory


def arguments(directory, start, *more):
    more = [start / part if part in ("smaller", "critic") else part for part in more]
    return [directory, "--ppo", "--save", "--model", start / "policy", *more]


def gradient_run(directory, start, batch, accumulation=1):
    config = GRADIENT | {
        "per_device_train_batch_size": batch,
        "steps_per_generation": accumulation,
        "gradient_accumulation_steps": accumulation,
    }
    return arguments(directory, start, "--value-model", "critic", "--request-seed", 1, config)


@pytest.fixture(scope="module")
def one_process(train, start, tmp_path_factory):
    """All runs of a single process: directory, and records by name."""
    directory = tmp_path_factory.mktemp("runs")
    runs = {kind: arguments(directory / kind, start, *more) for kind, more in KINDS.items()}
    for kind in EXPORTED:
        runs[kind] += ["--export", directory / f"{kind} exported"]
    records = train(*runs.values())
    return directory, dict(zip(runs, records, strict=True))


@pytest.fixture(scope="module")
def fresh(one_process, run_scenario):
    """By kind of run, what an engine started from the last weights says of the probe."""
    directory, _ = one_process
    exported = [directory / f"{kind} exported" for kind in EXPORTED]
    probes = run_scenario("fresh_engine.py", *exported)
    return dict(zip(EXPORTED, probes, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_policy_and_critic_learn(kind, one_process):
    record = one_process[1][kind]
    assert_metrics(record["history"], "int8")
    steps = [row for row in record["history"] if "loss" in row]
    assert len(steps) == 4
    assert set().union(*steps) >= {*PPO_METRICS.splitlines()}
    assert all(row["critic/grad_norm"] > 0 for row in steps)
    assert record["critic_moved"]
    assert record["probe_end"] != pytest.approx(record["probe_start"], abs=MOVED)
    sent = " ".join(record["sent_names"])
    assert sent
    assert not re.search("score|value|critic", sent)


@pytest.mark.parametrize("kind", EXPORTED)
def test_the_engine_holds_the_trained_policy(kind, one_process, fresh):
    assert one_process[1][kind]["probe_end"] == pytest.approx(fresh[kind], abs=SAME)


@pytest.mark.parametrize("kind", ["own", "another size"])
def test_policy_and_critic_are_saved_as_models_of_transformers(kind, one_process):
    directory = one_process[0] / kind
    AutoModelForCausalLM.from_pretrained(directory)
    critic = AutoModelForTokenClassification.from_pretrained(directory / "critic")
    assert critic.config.num_labels == 1
    assert critic.score.weight.any()
    assert critic.config.hidden_size == (64 if kind == "another size" else 128)
    tokenizer = AutoTokenizer.from_pretrained(directory / "critic")
    assert tokenizer("Ab2").input_ids == tiny_tokenizer()("Ab2").input_ids
    saved = " ".join(load_file(directory / "model.safetensors"))
    assert "score" not in saved, "the critic is in the policy's file"


def test_an_adapter_of_the_critic_is_saved_with_its_head(one_process):
    directory = one_process[0] / "LoRA critic" / "critic"
    names = " ".join(load_file(directory / "adapter_model.safetensors"))
    assert "score" in names
    assert "lora_B" in names


# Several processes
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow  # the steps of two processes without an engine: test_critic_processes.py
def test_two_processes_have_the_gradient_of_one(train, start, tmp_path):
    [one] = train(gradient_run(tmp_path / "one", start, batch=8))
    two, _ = train(
        gradient_run(tmp_path / "two", start, batch=4),
        gradient_run(tmp_path / "accumulated", start, batch=2, accumulation=2),
        processes=2,
    )
    assert (one["processes"], two["processes"], two["distribution"]) == (1, 2, "MULTI_CPU")
    for part, source in ((".", "policy"), ("critic", "critic")):
        before = load_file(start / source / "model.safetensors")
        changes = []
        for name in ("one", "two", "accumulated"):
            after = load_file(tmp_path / name / part / "model.safetensors")
            changes.append({key: before[key] - after[key] for key in before})
        expected, *others = changes
        assert sum(tensor.norm() > 1e-4 for tensor in expected.values()) > len(expected) / 2
        for other in others:
            torch.testing.assert_close(other, expected, rtol=1e-2, atol=1e-5)
