"""PPO from start to end with real engines: the critic learns, is saved and resumes, and no engine
sees it.
"""

import json

import pytest
import torch
from conftest import needs_avx512
from safetensors.torch import load_file
from support.training import ADAPTER, MOVED, SAME, assert_metrics, metrics_by_step
from tiny import ENGINE, save_tiny, tiny_classifier, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("ppo")]  # they share runs

PPO_METRICS = {
    f"critic/{name}"
    for name in ("value_loss", "value_clip_share", "explained_variance", "grad_norm")
}
PPO_METRICS |= {
    "critic/returns_mean",
    "critic/returns_std",
    "advantages/mean",
    "advantages/std",
    "time/values_s",
}

ONE = {"num_generations": 1, "critic_learning_rate": 1e-3}
KINDS = {
    "own": [],
    "LoRA policy": ["--lora"],
    "another size": ["--value-model", "SMALLER"],
    "LoRA critic": ["--critic-lora"],
    "rounded base": ["--lora"],
}
if needs_avx512.args[0]:
    del KINDS["rounded base"]
SETTINGS = {
    "LoRA policy": {"beta": 0.01},
    "rounded base": ADAPTER | {"round_base": True, "rollout_quantization": "w4a16"},
}
EXPORTED = [kind for kind in ("own", "LoRA policy", "rounded base") if kind in KINDS]
"""Runs that are compared with a fresh engine."""

STEPS = 8
LONG = ONE | {
    "steps_per_generation": 4,
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": 2,
}
LONG |= {"critic_warmup_steps": 3}

# Greedy, and exact, so no two tokens tie and noise does not matter. One batch: shuffling does not
# matter.
GRADIENT = {
    "rollout_quantization": None,
    "vllm_engine_kwargs": ENGINE | {"dtype": "float32"},
    "num_generations": 1,
    "top_k": 1,
    "max_steps": 1,
    "optim": "sgd",
    "shuffle_dataset": False,
    "uaq_scale": 1.0,
}
GRADIENT |= {"learning_rate": 1.0, "critic_learning_rate": 1.0}
GRADIENT |= {"max_grad_norm": 0.0, "gamma": 0.9, "gae_lambda": 0.8}


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


def arguments(directory, start, config, *more):
    return [
        directory,
        "--ppo",
        "--save",
        "--model",
        start / "policy",
        "--config",
        json.dumps(config),
        *more,
    ]


def gradient_run(directory, start, batch, accumulation=1):
    config = GRADIENT | {"per_device_train_batch_size": batch, "steps_per_generation": accumulation}
    config["gradient_accumulation_steps"] = accumulation
    return arguments(directory, start, config, "--value-model", start / "critic")


@pytest.fixture(scope="module")
def one_process(train, start, tmp_path_factory):
    """All runs of a single process: directory, and records by name."""
    directory = tmp_path_factory.mktemp("runs")
    runs = {}
    for kind, more in KINDS.items():
        more = [start / "smaller" if argument == "SMALLER" else argument for argument in more]
        more += ["--export", directory / f"{kind} exported"] if kind in EXPORTED else []
        runs[kind] = arguments(
            directory / kind, start, ONE | {"beta": 0.0} | SETTINGS.get(kind, {}), *more
        )
    runs["long"] = arguments(directory / "long", start, LONG)
    runs["gradient"] = gradient_run(directory / "gradient", start, batch=8)
    return directory, dict(zip(runs, train(*runs.values()), strict=True))


@pytest.fixture(scope="module")
def fresh(one_process, run_scenario):
    """By kind of critic, what an engine started from the last weights says of the probe."""
    probes = run_scenario(
        "fresh_engine.py", *(one_process[0] / f"{kind} exported" for kind in EXPORTED)
    )
    return dict(zip(EXPORTED, probes, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_policy_and_critic_learn(kind, one_process):
    record, is_rounded = one_process[1][kind], kind == "rounded base"
    assert_metrics(record["history"], "w4a16" if is_rounded else "int8")
    if is_rounded:  # both policies have the weights in four bits
        assert all(row.get("mismatch/kl_k3", 0.0) < 1e-4 for row in record["history"])
    steps = [row for row in record["history"] if "loss" in row]
    assert len(steps) == 4
    assert set().union(*steps) >= PPO_METRICS
    assert all(row["critic/grad_norm"] > 0 for row in steps)
    assert record["critic_moved"] == record["critic_parameters"] > 0
    assert record["probe_end"] != pytest.approx(record["probe_start"], abs=MOVED)


@pytest.mark.parametrize("kind", KINDS)
def test_the_critic_is_never_sent_to_the_engine(kind, one_process):
    names = one_process[1][kind]["sent_names"]
    assert names and not [
        name for name in names if "score" in name or "value" in name or "critic" in name
    ]


@pytest.mark.parametrize("kind", EXPORTED)
def test_the_engine_holds_the_trained_policy(kind, one_process, fresh):
    assert one_process[1][kind]["probe_end"] == pytest.approx(fresh[kind], abs=SAME)


@pytest.mark.parametrize("kind", ["own", "another size"])
def test_policy_and_critic_are_saved_as_models_of_transformers(kind, one_process):
    directory = one_process[0] / kind
    AutoModelForCausalLM.from_pretrained(directory)
    critic = AutoModelForTokenClassification.from_pretrained(directory / "critic")
    assert critic.config.num_labels == 1 and critic.score.weight.any()
    assert critic.config.hidden_size == (64 if kind == "another size" else 128)
    assert (
        AutoTokenizer.from_pretrained(directory / "critic")("Ab2").input_ids
        == tiny_tokenizer()("Ab2").input_ids
    )
    saved = load_file(directory / "model.safetensors")
    assert not [name for name in saved if "score" in name], "the critic is in the policy's file"


def test_an_adapter_of_the_critic_is_saved_with_its_head(one_process):
    adapter = load_file(one_process[0] / "LoRA critic" / "critic" / "adapter_model.safetensors")
    assert any("score" in name for name in adapter) and any("lora_B" in name for name in adapter)


# Stopping and resuming
# -----------------------------------------------------------------------------------------------

RESUMED = [2, 4]  # inside the first rollout, or between two rollouts and two epochs


@pytest.fixture(scope="module")
def resumed(train, start, one_process, tmp_path_factory):
    """Runs that start from a checkpoint of the uninterrupted one, in a new process."""
    directory = tmp_path_factory.mktemp("resumed")
    checkpoint = one_process[0] / "long" / "checkpoint-"
    runs = (
        arguments(directory / str(step), start, LONG, "--resume", f"{checkpoint}{step}")
        for step in RESUMED
    )
    return directory, dict(zip(RESUMED, train(*runs), strict=True))


def state_of(checkpoint):
    """Weights of the policy, and weights and optimizer of the critic."""
    critic = checkpoint / "critic_state"
    return {
        "policy": load_file(checkpoint / "model.safetensors"),
        "critic": load_file(critic / "model.safetensors"),
        "optimizer": torch.load(critic / "optimizer.bin", weights_only=True),
    }


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="equality to the last bit is claimed for the CPU only"
)
@pytest.mark.parametrize("step", RESUMED)
def test_a_resumed_run_equals_the_uninterrupted_one(step, one_process, resumed):
    expected, seen = metrics_by_step(one_process[1]["long"]), metrics_by_step(resumed[1][step])
    for later in range(step + 1, STEPS + 1):
        assert seen[later] == expected[later], f"step {later} differs after resuming at step {step}"
    assert len({row["critic/value_loss"] for row in expected.values()}) == STEPS
    ends = (
        directory / f"checkpoint-{STEPS}"
        for directory in (one_process[0] / "long", resumed[0] / str(step))
    )
    torch.testing.assert_close(*map(state_of, ends), rtol=0, atol=0)


def test_only_the_critic_learns_in_its_warmup(one_process, start):
    before = load_file(start / "policy" / "model.safetensors")
    checkpoints = {step: one_process[0] / "long" / f"checkpoint-{step}" for step in (2, 4)}
    policies = {step: load_file(path / "model.safetensors") for step, path in checkpoints.items()}
    optimizer = torch.load(checkpoints[2] / "optimizer.pt", weights_only=True)
    assert not optimizer["state"], "the policy's optimizer has gathered momentum"
    # UAQ rescales other weights at the start, but not these two.
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(policies[2][name], before[name])
    assert not torch.equal(
        policies[4]["model.embed_tokens.weight"], before["model.embed_tokens.weight"]
    )
    assert load_file(checkpoints[2] / "critic" / "model.safetensors")["score.weight"].any()
    losses = [row["loss"] for row in one_process[1]["long"]["history"] if "loss" in row]
    assert losses[:3] == [0, 0, 0] and losses[3] != 0, (
        "DeepSpeed steps before the callback is asked"
    )


# Several processes
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow  # the steps of two processes without an engine: test_critic_processes.py
def test_two_processes_have_the_gradient_of_one(train, one_process, start, tmp_path):
    one = one_process[1]["gradient"]
    two, _ = train(
        gradient_run(tmp_path / "two", start, batch=4),
        gradient_run(tmp_path / "accumulated", start, batch=2, accumulation=2),
        processes=2,
    )
    assert (one["processes"], two["processes"], two["distribution"]) == (1, 2, "MULTI_CPU")
    for part, source in ((".", "policy"), ("critic", "critic")):
        before = load_file(start / source / "model.safetensors")
        runs = (one_process[0] / "gradient", tmp_path / "two", tmp_path / "accumulated")
        ends = [load_file(directory / part / "model.safetensors") for directory in runs]
        one, *others = [{name: before[name] - after[name] for name in before} for after in ends]
        assert sum(tensor.norm() > 1e-4 for tensor in one.values()) > len(one) / 2
        for other in others:
            torch.testing.assert_close(other, one, rtol=1e-2, atol=1e-5)
