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
from support.training import (
    ADAPTER,
    BETWEEN_ROLLOUTS,
    CONFIG,
    INSIDE_A_ROLLOUT,
    STEPS,
    metrics_by_step,
    rollout_rows,
)
from tiny import ENGINE
from trl.trainer.utils import RepeatSampler

from trl_qurl.trainers.saving import SHAPE, load_rollout_state, save_rollout_state, skip_epochs

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="equality to the last bit is claimed for the CPU only"
    ),
]

SHAPED = SimpleNamespace(**dict.fromkeys(SHAPE, 2))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, train):
    directory = tmp_path_factory.mktemp("uninterrupted")
    [record] = train([directory, "--config", json.dumps(CONFIG)])
    return directory, record


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, train, uninterrupted):
    """The runs that start from a checkpoint of the uninterrupted one, and where they write their
    own.
    """
    directories = {
        step: tmp_path_factory.mktemp("resumed") for step in (INSIDE_A_ROLLOUT, BETWEEN_ROLLOUTS)
    }
    records = train(
        *(
            [
                directory,
                "--resume",
                uninterrupted[0] / f"checkpoint-{step}",
                "--config",
                json.dumps(CONFIG),
            ]
            for step, directory in directories.items()
        )
    )
    return dict(zip(directories, zip(directories.values(), records, strict=True), strict=True))


@pytest.mark.xdist_group("resume")
@pytest.mark.parametrize("step", [INSIDE_A_ROLLOUT, BETWEEN_ROLLOUTS])
def test_later_steps_are_those_of_the_uninterrupted_run(step, uninterrupted, resumed):
    expected, seen = metrics_by_step(uninterrupted[1]), metrics_by_step(resumed[step][1])
    assert expected.keys() == seen.keys() == set(range(1, STEPS + 1))
    # No tolerance. Everything that decides the next token is restored: weights, optimizer, the
    # place in the data, the rollout in progress; and noise depends on the step. One thread sums in
    # one order.
    for later in range(step + 1, STEPS + 1):
        assert seen[later] == expected[later], f"step {later} differs after resuming at step {step}"
    # What is compared moves, and is there.
    assert len({metrics["loss"] for metrics in expected.values()}) == STEPS
    assert all({"grad_norm", "entropy"} <= metrics.keys() for metrics in expected.values())
    rollouts = [expected[first] for first in range(1, STEPS + 1, 4)]
    assert all("reward" in rollout for rollout in rollouts)
    assert len({rollout["mismatch/kl_k3"] for rollout in rollouts}) == len(rollouts)


@pytest.mark.xdist_group("resume")
@pytest.mark.parametrize("step", [INSIDE_A_ROLLOUT, BETWEEN_ROLLOUTS])
def test_uaq_is_not_applied_again_on_resuming(step, uninterrupted, resumed):
    # A second division by 1.5 leaves the outputs as they are, so the weights themselves are
    # compared.
    ends = [
        load_file(directory / f"checkpoint-{STEPS}" / "model.safetensors")
        for directory, _ in (uninterrupted, resumed[step])
    ]
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)
    assert resumed[step][1]["uaq_scale"] == uninterrupted[1]["uaq_scale"] == 1.5
    assert resumed[step][1]["probe_end"] == uninterrupted[1]["probe_end"]


@pytest.mark.xdist_group("resume")
def test_training_a_saved_model_again_does_not_scale_it_again(uninterrupted, train, tmp_path):
    saved = uninterrupted[0] / f"checkpoint-{STEPS}"
    # With a learning rate of 0 nothing but UAQ could change the weights.
    still = {"learning_rate": 0.0, "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    [record] = train([tmp_path, "--model", saved, "--config", json.dumps(still)])
    start, end = (
        load_file(saved / "model.safetensors"),
        load_file(tmp_path / "checkpoint-1" / "model.safetensors"),
    )
    torch.testing.assert_close(end, start, rtol=0, atol=0)
    assert record["uaq_scale"] == 1.5
    # Up to the scales of smoothing, which the first run has and this one has not.
    assert record["probe_start"] == pytest.approx(uninterrupted[1]["probe_end"], abs=0.02)


@pytest.mark.xdist_group("resume")
def test_the_seed_decides_the_noise(train, tmp_path):
    """Prompts come in one order, so that other completions have other noise."""
    plain = {
        "max_steps": 4,
        "shuffle_dataset": False,
        "smooth_activations": False,
        "learning_rate": 0.0,
    }
    engine = {"seed": 2, "vllm_engine_kwargs": ENGINE | {"seed": 1}}
    first, other, again, reseeded = train(
        *(
            [tmp_path, "--config", json.dumps(plain | changed)]
            for changed in ({"seed": 1}, {"seed": 2}, engine)
        ),
        [tmp_path, "--reseed", "--config", json.dumps(plain | {"seed": 1})],
    )
    rollouts = [metrics_by_step(record) for record in (first, other, again)]
    assert rollouts[0] == rollouts[2], "the same noise, with the seed of the engine alone"
    assert (
        rollouts[0][1]["reward"] != rollouts[1][1]["reward"]
        and rollouts[0][1]["loss"] != rollouts[1][1]["loss"]
    )
    rewards = [[row["reward"] for row in rollout_rows(record)] for record in (first, reseeded)]
    assert len(set(rewards[0])) == 2, "each rollout has noise of its own"
    assert rewards[0] == rewards[1], "a reward function has changed the noise of the next rollout"


@pytest.mark.xdist_group("resume")
@needs_avx512
def test_an_adapter_on_a_rounded_base_resumes(train, tmp_path):
    """The base is loaded and rounded again, as in any new process; the checkpoint has the adapter
    alone.
    """
    config = (
        CONFIG | ADAPTER | {"round_base": True, "rollout_quantization": "w4a16", "max_steps": 6}
    )
    arguments = ["--lora", "--config", json.dumps(config)]
    [whole] = train([tmp_path / "whole", *arguments])
    checkpoint = tmp_path / "whole" / f"checkpoint-{INSIDE_A_ROLLOUT}"
    assert not (checkpoint / "model.safetensors").exists()
    [resumed] = train([tmp_path / "resumed", "--resume", checkpoint, *arguments])
    expected, seen = metrics_by_step(whole), metrics_by_step(resumed)
    assert [expected[step]["loss"] for step in range(3, 7)] == [
        seen[step]["loss"] for step in range(3, 7)
    ]
    assert all(seen[step] == expected[step] for step in range(3, 7))
    assert len({metrics["loss"] for metrics in expected.values()}) == 6
    assert resumed["probe_end"] == whole["probe_end"] != whole["probe_start"]


def test_a_state_loads_onto_the_device_of_one_process_among_several(tmp_path):
    # Accelerate calls it "cpu:0", which torch.load cannot restore to.
    batches = [{"advantages": torch.arange(3.0), "num_items_in_batch": torch.tensor(7)}]
    second = SimpleNamespace(process_index=1, num_processes=2, device=torch.device("cpu", 0))
    save_rollout_state({"step": 5, "batches": batches}, tmp_path, second, SHAPED)
    state = load_rollout_state(tmp_path, second, SHAPED)
    assert state is not None and state["step"] == 5
    assert torch.equal(state["batches"][0]["advantages"], batches[0]["advantages"])
    assert (
        load_rollout_state(tmp_path, SimpleNamespace(process_index=0, num_processes=2), SHAPED)
        is None
    )
    more = SimpleNamespace(process_index=1, num_processes=3)
    assert load_rollout_state(tmp_path, more, SHAPED) is None, "the third process has no state"


@pytest.mark.parametrize("name", SHAPE)
def test_a_rollout_of_another_shape_is_dropped_with_one_line(name, tmp_path, caplog):
    process = SimpleNamespace(process_index=0, num_processes=1, device=torch.device("cpu"))
    PartialState()
    state = {
        "step": 6,
        "batches": [{}, {}],
        "ahead": {"prompts": []},
        "smoothing": {},
        "prompts_drawn": 7,
    }
    save_rollout_state(state, tmp_path, process, SHAPED)
    assert load_rollout_state(tmp_path, process, SHAPED)["step"] == 6 and not caplog.records
    changed = SimpleNamespace(**(vars(SHAPED) | {name: 3}))
    seen = load_rollout_state(tmp_path, process, changed)
    assert (seen["step"], seen["batches"], seen["ahead"]) == (0, None, None)
    assert (seen["smoothing"], seen["prompts_drawn"]) == ({}, 7), "the rest fits any shape"
    [record] = caplog.records
    assert record.getMessage().endswith(
        f"a new rollout instead of the checkpoint's: {name} changed."
    )


@pytest.mark.slow
@pytest.mark.xdist_group("resume")
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
    changes, uninterrupted, train, tmp_path
):
    checkpoint = uninterrupted[0] / f"checkpoint-{INSIDE_A_ROLLOUT}"
    [record] = train(
        [
            tmp_path,
            "--resume",
            checkpoint,
            "--config",
            json.dumps(CONFIG | {"max_steps": 6} | changes),
        ]
    )
    seen = metrics_by_step(record)
    assert set(seen) == {1, 2, 3, 4, 5, 6}
    is_new = [step for step in range(3, 7) if "reward" in seen[step]]
    # A new shape has two updates per rollout, and the rollout that the checkpoint was in the middle
    # of is dropped.
    assert is_new == ([5] if "smooth_activations" in changes else [3, 5])
    assert all(abs(seen[step]["loss"]) < 1 for step in range(3, 7))
    assert all(seen[step]["mismatch/kl_k3"] < 0.01 for step in is_new)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_resumed_epoch_has_its_own_order(shuffle):
    def orders(epochs, epoch=0):
        sampler = RepeatSampler(
            range(50), mini_repeat_count=2, batch_size=5, shuffle=shuffle, seed=3
        )
        skip_epochs(sampler, epoch)
        return [list(sampler) for _ in range(epochs)]

    first, second, third = orders(3)
    assert (first != second) is shuffle
    for epoch, order in ((0.0, first), (0.75, first), (1.0, second), (2.5, third), (None, first)):
        assert orders(1, epoch) == [order]
    skip_epochs(None, 2)  # a streamed data set has no sampler


def test_a_state_that_was_not_written_to_its_end_leaves_the_earlier_one(tmp_path, monkeypatch):
    process = SimpleNamespace(process_index=0, num_processes=1, device=torch.device("cpu"))
    save_rollout_state({"step": 5}, tmp_path, process, SHAPED)

    def break_off(state, path):
        path.write_bytes(b"PK")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", break_off)
    with pytest.raises(OSError, match="disk full"):
        save_rollout_state({"step": 9}, tmp_path, process, SHAPED)
    assert load_rollout_state(tmp_path, process, SHAPED)["step"] == 5
