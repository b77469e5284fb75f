"""PPO from start to end with real engines: the critic learns, is saved and resumes, and no engine sees it."""

import json

import pytest
import torch
from conftest import needs_avx512
from safetensors.torch import load_file
from support.training import ADAPTER, MOVED, SAME, assert_metrics, metrics_by_step
from tiny import save_tiny, tiny_classifier, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("ppo")]  # they share runs

PPO_METRICS = {
    "critic/value_loss",
    "critic/value_clip_share",
    "critic/explained_variance",
    "critic/returns_mean",
    "critic/returns_std",
    "critic/grad_norm",
    "advantages/mean",
    "advantages/std",
    "time/values_s",
}

ONE = {"num_generations": 1, "critic_learning_rate": 1e-3}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("policy"), tiny_model())


@pytest.fixture(scope="module")
def smaller(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("smaller"), tiny_model(hidden_size=64, num_hidden_layers=1, seed=3))


KINDS = {
    "own": [],
    "LoRA policy": ["--lora"],
    "another size": ["--value-model", "SMALLER"],
    "LoRA critic": ["--critic-lora"],
    "adapter on a rounded base": ["--lora"],
}
ROUNDED = ADAPTER | {"round_base": True, "rollout_quantization": "w4a16"}
EXPORTED = ["own", "LoRA policy", "adapter on a rounded base"]  # to be compared with a fresh engine


def can_run(kind):
    return "rounded" not in kind or not needs_avx512.args[0]


def marked(kinds):
    return [pytest.param(kind, marks=needs_avx512) if "rounded" in kind else kind for kind in kinds]


STEPS = 8
LONG = {"own": {"critic_warmup_steps": 3}}
LONG_CONFIG = ONE | {"steps_per_generation": 4, "max_steps": STEPS, "save_strategy": "steps", "save_steps": 2}

# Greedy: completions do not depend on the process. One batch: shuffling does not matter.
GRADIENT = {
    "num_generations": 1,
    "top_k": 1,
    "max_steps": 1,
    "optim": "sgd",
    "learning_rate": 1.0,
    "critic_learning_rate": 1.0,
    "max_grad_norm": 0.0,
    "gamma": 0.9,
    "gae_lambda": 0.8,
    "uaq_scale": 1.0,
    "shuffle_dataset": False,
}


def gradient_run(directory, policy, critic_start, batch, accumulation=1):
    config = GRADIENT | {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": accumulation,
    }
    models = ["--model", policy, "--value-model", critic_start]
    return [directory, "--ppo", "--save", *models, "--config", json.dumps(config)]


@pytest.fixture(scope="module")
def critic_start(tmp_path_factory):
    """A critic with a head that is not zero: its backbone has a gradient from the first step on."""
    critic = tiny_classifier(seed=5)
    torch.nn.init.normal_(critic.score.weight)
    return save_tiny(tmp_path_factory.mktemp("start"), critic)


@pytest.fixture(scope="module")
def one_process(train, policy, smaller, critic_start, tmp_path_factory):
    """All runs of a single process, one after the other: directory, and records by name."""
    directory = tmp_path_factory.mktemp("runs")

    def short(kind, further):
        config = ONE | {"beta": 0.01 if kind == "LoRA policy" else 0.0}
        config |= ROUNDED if "rounded" in kind else {}
        further = [smaller if argument == "SMALLER" else argument for argument in further]
        exported = ["--export", directory / f"{kind} exported"] if kind in EXPORTED else []
        models = ["--model", policy, *further]
        return [directory / kind, "--ppo", "--save", *models, "--config", json.dumps(config), *exported]

    def long(kind, config):
        return [directory / f"long {kind}", "--ppo", "--model", policy, "--config", json.dumps(LONG_CONFIG | config)]

    runs = {kind: short(kind, further) for kind, further in KINDS.items() if can_run(kind)}
    runs |= {f"long {kind}": long(kind, config) for kind, config in LONG.items()}
    runs["gradient"] = gradient_run(directory / "gradient", policy, critic_start, batch=8)
    return directory, dict(zip(runs, train(*runs.values()), strict=True))


@pytest.fixture(scope="module")
def fresh(one_process, run_scenario):
    """By kind of critic, what an engine started from the last weights says of the probe."""
    directory, _ = one_process
    exported = [kind for kind in EXPORTED if can_run(kind)]
    probes = run_scenario("fresh_engine.py", *(directory / f"{kind} exported" for kind in exported))
    return dict(zip(exported, probes, strict=True))


@pytest.mark.parametrize("kind", marked(KINDS))
def test_policy_and_critic_learn(kind, one_process):
    record, rounded = one_process[1][kind], "rounded" in kind
    assert_metrics(record["history"], "w4a16" if rounded else "int8")
    if rounded:  # what four bits change, both policies have
        assert all(row.get("mismatch/kl_k3", 0.0) < 1e-4 for row in record["history"])
    steps = [row for row in record["history"] if "loss" in row]
    assert len(steps) == 4
    logged = set().union(*steps)
    assert logged >= PPO_METRICS, PPO_METRICS - logged
    assert all(row["critic/grad_norm"] > 0 for row in steps)
    # Bias of the last projection apart, every trained tensor of the critic has moved.
    assert record["critic_moved"] == record["critic_parameters"] > 0
    assert record["probe_end"] != pytest.approx(record["probe_start"], abs=MOVED)


@pytest.mark.parametrize("kind", marked(KINDS))
def test_the_critic_is_never_sent_to_the_engine(kind, one_process):
    names = one_process[1][kind]["sent_names"]
    assert names and not [name for name in names if "score" in name or "value" in name or "critic" in name]


@pytest.mark.parametrize("kind", marked(EXPORTED))
def test_the_engine_holds_the_trained_policy(kind, one_process, fresh):
    assert one_process[1][kind]["probe_end"] == pytest.approx(fresh[kind], abs=SAME)


@pytest.mark.parametrize("kind", ["own", "another size"])
def test_policy_and_critic_are_saved_as_models_of_transformers(kind, one_process):
    directory = one_process[0] / kind
    AutoModelForCausalLM.from_pretrained(directory)
    critic = AutoModelForTokenClassification.from_pretrained(directory / "critic")
    assert critic.config.num_labels == 1 and critic.score.weight.any()
    assert critic.config.hidden_size == (64 if kind == "another size" else 128)
    assert AutoTokenizer.from_pretrained(directory / "critic")("Ab2").input_ids == tiny_tokenizer()("Ab2").input_ids
    saved = load_file(directory / "model.safetensors")
    assert not [name for name in saved if "score" in name], "the critic is in the policy's file"


def test_an_adapter_is_saved_with_its_head(one_process):
    directory = one_process[0]
    adapter = load_file(directory / "LoRA critic" / "critic" / "adapter_model.safetensors")
    assert any("score" in name for name in adapter) and any("lora_B" in name for name in adapter)


# Stopping and resuming -----------------------------------------------------------------------------------------------

RESUMED = [("own", 2), ("own", 4)]  # inside the first rollout, or between two rollouts and two epochs


@pytest.fixture(scope="module")
def resumed(train, policy, one_process, tmp_path_factory):
    """Runs that start from a checkpoint of the uninterrupted ones, in a new process."""
    directory = tmp_path_factory.mktemp("resumed")
    records = train(
        *(
            [
                directory / kind / str(step),
                "--ppo",
                *("--model", policy),
                *("--resume", one_process[0] / f"long {kind}" / f"checkpoint-{step}"),
                *("--config", json.dumps(LONG_CONFIG | LONG[kind])),
            ]
            for kind, step in RESUMED
        )
    )
    return directory, dict(zip(RESUMED, records, strict=True))


def state_of_the_critic(checkpoint):
    """Weights and optimizer, by name."""
    directory = checkpoint / "critic_state"
    return {
        "weights": load_file(directory / "model.safetensors"),
        "optimizer": torch.load(directory / "optimizer.bin", weights_only=True),
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="equality to the last bit is claimed for the CPU only")
@pytest.mark.parametrize(("kind", "step"), RESUMED)
def test_a_resumed_run_equals_the_uninterrupted_one(kind, step, one_process, resumed):
    directory, records = one_process
    expected, seen = metrics_by_step(records[f"long {kind}"]), metrics_by_step(resumed[1][kind, step])
    for later in range(step + 1, STEPS + 1):
        assert seen[later] == expected[later], f"step {later} differs after resuming at step {step}"
    assert len({row["critic/value_loss"] for row in expected.values()}) == STEPS
    ends = directory / f"long {kind}" / f"checkpoint-{STEPS}", resumed[0] / kind / str(step) / f"checkpoint-{STEPS}"
    for state in (lambda end: load_file(end / "model.safetensors"), state_of_the_critic):
        torch.testing.assert_close(*map(state, ends), rtol=0, atol=0)


def test_only_the_critic_learns_in_its_warmup(one_process, policy):
    start = load_file(policy / "model.safetensors")
    checkpoints = {step: one_process[0] / "long own" / f"checkpoint-{step}" for step in (2, 4)}
    policies = {step: load_file(path / "model.safetensors") for step, path in checkpoints.items()}
    optimizer = torch.load(checkpoints[2] / "optimizer.pt", weights_only=True)
    assert not optimizer["state"], "the policy's optimizer has gathered momentum"
    norms = {name for name in start if "norm" in name}
    # UAQ rescales at the start, by exactly 1.5 here; the embedding it leaves alone.
    assert torch.equal(policies[2]["model.embed_tokens.weight"], start["model.embed_tokens.weight"])
    torch.testing.assert_close(policies[2]["model.norm.weight"], start["model.norm.weight"], rtol=0, atol=0)
    assert norms and not torch.equal(policies[4]["model.embed_tokens.weight"], start["model.embed_tokens.weight"])
    critics = {step: load_file(path / "critic" / "model.safetensors") for step, path in checkpoints.items()}
    assert critics[2]["score.weight"].any()
    losses = [row["loss"] for row in one_process[1]["long own"]["history"] if "loss" in row]
    assert losses[:3] == [0, 0, 0] and losses[3] != 0, "DeepSpeed steps before the callback is asked"


# Several processes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow  # the steps of two processes without an engine: test_critic_processes.py
def test_two_processes_have_the_gradient_of_one(train, one_process, policy, critic_start, tmp_path):
    one = one_process[1]["gradient"]
    two, accumulated = train(
        gradient_run(tmp_path / "two", policy, critic_start, batch=4),
        gradient_run(tmp_path / "accumulated", policy, critic_start, batch=2, accumulation=2),
        processes=2,
    )
    assert (one["processes"], two["processes"], two["distribution"]) == (1, 2, "MULTI_CPU")
    directories = {
        "one": one_process[0] / "gradient",
        "two": tmp_path / "two",
        "accumulated": tmp_path / "accumulated",
    }
    for part, start in ((".", policy), ("critic", critic_start)):
        before = load_file(start / "model.safetensors")
        gradients = {}
        for name, directory in directories.items():
            after = load_file(directory / part / "model.safetensors")
            gradients[name] = {key: before[key] - after[key] for key in before}
        moved = [tensor.norm() > 1e-4 for tensor in gradients["one"].values()]
        assert sum(moved) > len(moved) / 2
        torch.testing.assert_close(gradients["two"], gradients["one"], rtol=1e-2, atol=1e-5)
        torch.testing.assert_close(gradients["accumulated"], gradients["one"], rtol=1e-2, atol=1e-5)
