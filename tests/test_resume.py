"""A run that stops and resumes is the run that never stopped.

The uninterrupted run saves a checkpoint every two steps; the others start in a new process from two
of them, as after a crash. Four updates share a rollout, so checkpoint 2 lies inside a rollout and
checkpoint 4 between two.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from conftest import needs_avx512
from safetensors.torch import load_file
from support.training import ADAPTER, metrics_by_step, rollout_rows
from tiny import ENGINE, save_tiny
from trl.trainer.utils import RepeatSampler

from trl_qurl.trainers.saving import load_rollout_state, save_rollout_state, skip_epochs

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="equality to the last bit is claimed for the CPU only"
    ),
]

INSIDE_A_ROLLOUT = 2
BETWEEN_ROLLOUTS = 4
STEPS = 8
CONFIG = {
    "steps_per_generation": 4,
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": 2,
    "smooth_activations": None,  # the default: a checkpoint has to keep its scales
}
PPO = {
    "num_generations": 1,
    "critic_learning_rate": 1e-3,
    "critic_warmup_steps": 3,
}
ROUNDED = ADAPTER | {"round_base": True, "rollout_quantization": "w4a16"}
RESUMED = [("GRPO", INSIDE_A_ROLLOUT), ("GRPO", BETWEEN_ROLLOUTS), ("RLOO", INSIDE_A_ROLLOUT)]
RESUMED += [("PPO", INSIDE_A_ROLLOUT), ("PPO", BETWEEN_ROLLOUTS)]
if not needs_avx512.args[0]:
    RESUMED.append(("rounded base", INSIDE_A_ROLLOUT))

NOISE = {
    "max_steps": 4,
    "shuffle_dataset": False,  # so that other completions have other noise
    "smooth_activations": False,
    "learning_rate": 0.0,
}
NOISES = {
    "first": [NOISE | {"seed": 1}],
    "other": [NOISE | {"seed": 2}],
    "again": [NOISE | {"seed": 2, "vllm_engine_kwargs": ENGINE | {"seed": 1}}],
    "reseeded": ["--reseed", NOISE | {"seed": 1}],
}

NAMES = (
    "per_device_train_batch_size",
    "num_generations",
    "steps_per_generation",
    "num_iterations",
    "gradient_accumulation_steps",
    "beta",
    "vllm_importance_sampling_correction",
    "temperature",
    "cast_lm_head_to_fp32",
    "top_k",
    "top_p",
    "min_p",
    "vllm_structured_outputs_regex",
    "generation_kwargs",
)
SHAPED = SimpleNamespace(**dict.fromkeys(NAMES, 2))

engines = pytest.mark.xdist_group("resume")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    save_tiny(directory / "model")
    return directory


@pytest.fixture(scope="module")
def kinds(directory):
    model = ["--model", directory / "model"]
    runs = {
        "GRPO": [CONFIG],
        "RLOO": ["--rloo", *model, CONFIG | {"beta": 0.0}],
        "PPO": ["--ppo", *model, CONFIG | PPO],
        "rounded base": ["--lora", CONFIG | ROUNDED],
    }
    return {kind: runs[kind] for kind, _ in RESUMED}


@pytest.fixture(scope="module")
def whole(train, directory, kinds):
    """The runs that never stop."""
    runs = {name: [directory / name, *parts] for name, parts in (kinds | NOISES).items()}
    records = train(*runs.values())
    return dict(zip(runs, records, strict=True))


@pytest.fixture(scope="module")
def resumed(train, directory, kinds, whole):
    """The runs that start from a checkpoint of an uninterrupted one, in a new process; the last one
    takes a checkpoint for its model.
    """
    runs = {}
    for kind, step in RESUMED:
        checkpoint = directory / kind / f"checkpoint-{step}"
        runs[kind, step] = [directory / f"{kind} {step}", "--resume", checkpoint, *kinds[kind]]
    # With a learning rate of 0 nothing but UAQ could change the weights.
    still = {
        "learning_rate": 0.0,
        "max_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    last = directory / "GRPO" / f"checkpoint-{STEPS}"
    runs["model"] = [directory / "still", "--model", last, still]
    records = train(*runs.values())
    return dict(zip(runs, records, strict=True))


def state_of(checkpoint):
    """All weights and optimizers: of the policy or its adapter, and of the critic."""
    found = {}
    for path in checkpoint.rglob("*.safetensors"):
        found[str(path.relative_to(checkpoint))] = load_file(path)
    for path in checkpoint.rglob("optimizer.*"):
        optimizer = torch.load(path, weights_only=True)
        found[str(path.relative_to(checkpoint))] = optimizer["state"]
    return found


@engines
@pytest.mark.parametrize(("kind", "step"), RESUMED)
def test_a_resumed_run_is_the_one_that_never_stopped(kind, step, directory, whole, resumed):
    record = resumed[kind, step]
    uninterrupted = whole[kind]
    expected = metrics_by_step(uninterrupted)
    seen = metrics_by_step(record)
    assert expected.keys() == seen.keys() == set(range(1, STEPS + 1))
    # No tolerance. Everything that decides the next token is restored: weights, optimizer, the
    # place in the data, the rollout in progress; and noise depends on the step. One thread sums in
    # one order.
    for later in range(step + 1, STEPS + 1):
        assert seen[later] == expected[later], f"step {later} differs"
    ends = [directory / name / f"checkpoint-{STEPS}" for name in (kind, f"{kind} {step}")]
    torch.testing.assert_close(*map(state_of, ends), rtol=0, atol=0)
    assert record["probe_end"] == uninterrupted["probe_end"] != uninterrupted["probe_start"]
    # A second division by 1.5 would leave the outputs as they are.
    scale = 1.0 if kind == "rounded base" else 1.5
    assert record["uaq_scale"] == uninterrupted["uaq_scale"] == scale
    # What is compared moves, and is there.
    moving = "critic/value_loss" if kind == "PPO" else "loss"
    assert len({metrics[moving] for metrics in expected.values()}) == STEPS
    assert all({"grad_norm", "entropy"} <= metrics.keys() for metrics in expected.values())
    first, second = rollout_rows(uninterrupted)
    assert first["reward"] != second["reward"]
    assert first["mismatch/kl_k3"] != second["mismatch/kl_k3"]


@engines
def test_rloo_logs_what_grpo_does(whole, directory):
    grpo = metrics_by_step(whole["GRPO"]).values()
    rloo = metrics_by_step(whole["RLOO"]).values()
    missing = set().union(*grpo) - set().union(*rloo)
    # what TRL's RLOO and other objectives have not
    assert not [name for name in missing if not name.startswith(("acr/", "sampling/"))]
    assert max(row["policy/approx_kl"] for row in rloo) > 0
    card = (directory / "RLOO" / "README.md").read_text()
    assert "was trained with QuRL, a method introduced in" in card


@engines
def test_only_the_critic_learns_in_its_warmup(whole, directory):
    checkpoint = directory / "PPO" / "checkpoint-2"
    start = load_file(directory / "model" / "model.safetensors")
    in_warmup = load_file(checkpoint / "model.safetensors")
    later = load_file(directory / "PPO" / "checkpoint-4" / "model.safetensors")
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    assert not optimizer["state"], "the policy's optimizer has gathered momentum"
    # UAQ rescales other weights at the start, but not these two.
    embedding = "model.embed_tokens.weight"
    for name in (embedding, "model.norm.weight"):
        assert torch.equal(in_warmup[name], start[name])
    assert not torch.equal(later[embedding], start[embedding])
    critic = load_file(checkpoint / "critic" / "model.safetensors")
    assert critic["score.weight"].any()
    losses = [row["loss"] for row in metrics_by_step(whole["PPO"]).values()]
    assert losses[:3] == [0, 0, 0] and losses[3] != 0, (
        "DeepSpeed steps before the callback is asked"
    )


@engines
@needs_avx512
def test_a_checkpoint_of_an_adapter_has_the_adapter_alone(whole, directory):
    assert not (directory / "rounded base" / "checkpoint-2" / "model.safetensors").exists()


@engines
def test_training_a_saved_model_again_does_not_scale_it_again(whole, resumed, directory):
    start = load_file(directory / "GRPO" / f"checkpoint-{STEPS}" / "model.safetensors")
    end = load_file(directory / "still" / "checkpoint-1" / "model.safetensors")
    torch.testing.assert_close(end, start, rtol=0, atol=0)
    assert resumed["model"]["uaq_scale"] == 1.5
    # Up to the scales of smoothing, which the first run has and this one has not.
    expected = pytest.approx(whole["GRPO"]["probe_end"], abs=0.02)
    assert resumed["model"]["probe_start"] == expected


@engines
def test_the_seed_decides_the_noise(whole):
    rewards = {}
    for name in NOISES:
        rewards[name] = [(row["reward"], row["reward_std"]) for row in rollout_rows(whole[name])]
    assert len(set(rewards["first"])) == 2, "each rollout has noise of its own"
    assert rewards["first"][0] != rewards["other"][0]
    assert metrics_by_step(whole["first"]) == metrics_by_step(whole["again"]), "the engine's seed"
    assert rewards["first"] == rewards["reseeded"], "a reward function has changed the noise"


def process(index=0, number=1):
    PartialState()
    device = torch.device("cpu", 0)  # as Accelerate calls it, but torch.load cannot restore to it
    return SimpleNamespace(process_index=index, num_processes=number, device=device)


def test_a_state_loads_onto_the_device_of_one_process_among_several(tmp_path):
    batches = [{"advantages": torch.arange(3.0), "num_items_in_batch": torch.tensor(7)}]
    save_rollout_state({"step": 5, "batches": batches}, tmp_path, process(1, 2), SHAPED)
    state = load_rollout_state(tmp_path, process(1, 2), SHAPED)
    assert state["step"] == 5
    torch.testing.assert_close(state["batches"], batches)
    assert load_rollout_state(tmp_path, process(0, 2), SHAPED) is None, "it has no state"
    assert load_rollout_state(tmp_path, process(1, 3), SHAPED)["batches"] is None


@pytest.mark.parametrize("name", NAMES)
def test_a_rollout_of_another_shape_is_dropped_with_one_line(name, tmp_path, caplog):
    state = {"step": 6, "batches": [{}, {}], "smoothing": {}, "prompts_drawn": 7}
    save_rollout_state(state, tmp_path, process(), SHAPED)
    assert load_rollout_state(tmp_path, process(), SHAPED)["step"] == 6
    assert not caplog.records
    changed = SimpleNamespace(**vars(SHAPED) | {name: 3})
    seen = load_rollout_state(tmp_path, process(), changed)
    assert seen == seen | state | {"step": 0, "batches": None}
    [record] = caplog.records
    assert record.getMessage().endswith(f"{name} changed.")


@pytest.mark.slow
@engines
@pytest.mark.parametrize(
    "changes",
    [
        {"steps_per_generation": 2, "quantization_ignore": ["lm_head", "re:.*down_proj"]},
        {"gradient_accumulation_steps": 2},
        {"smooth_activations": False},
    ],
    ids=json.dumps,
)
def test_a_run_resumes_inside_a_rollout_with_other_settings(
    changes, whole, directory, train, tmp_path
):
    checkpoint = directory / "GRPO" / f"checkpoint-{INSIDE_A_ROLLOUT}"
    config = CONFIG | {"max_steps": 6} | changes
    [record] = train([tmp_path, "--resume", checkpoint, config])
    seen = metrics_by_step(record)
    assert set(seen) == set(range(1, 7))
    is_new = [step for step in range(3, 7) if "reward" in seen[step]]
    # A new shape has two updates per rollout, and the rollout that the checkpoint was in the middle
    # of is dropped.
    assert is_new == ([5] if "smooth_activations" in changes else [3, 5])
    assert all(abs(seen[step]["loss"]) < 1 for step in range(3, 7))
    assert all(seen[step]["mismatch/kl_k3"] < 0.01 for step in is_new)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_resumed_epoch_has_its_own_order(shuffle):
    def sampler():
        return RepeatSampler(range(50), mini_repeat_count=2, batch_size=5, shuffle=shuffle, seed=3)

    uninterrupted = sampler()
    first, second, third = (list(uninterrupted) for _ in range(3))
    assert (first != second) is shuffle
    for epoch, order in ((0.75, first), (1.0, second), (2.5, third), (None, first)):
        resumed = sampler()
        skip_epochs(resumed, epoch)
        assert list(resumed) == order
    skip_epochs(None, 2)  # a streamed data set has no sampler


def test_a_state_that_was_not_written_to_its_end_leaves_the_earlier_one(tmp_path, monkeypatch):
    save_rollout_state({"step": 5}, tmp_path, process(), SHAPED)

    def break_off(state, path):
        path.write_bytes(b"PK")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", break_off)
    with pytest.raises(OSError, match="disk full"):
        save_rollout_state({"step": 9}, tmp_path, process(), SHAPED)
    assert load_rollout_state(tmp_path, process(), SHAPED)["step"] == 5
