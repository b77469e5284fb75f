"""Faults of a real server: the run continues with equal results, or stops with one sentence and a
new run works.

tests/reliability.md and docs/reliability.md list the same faults.
"""

import functools
import json
import subprocess
import threading
import time
from pathlib import Path

import pytest
from conftest import SCENARIOS, child_environment, group_members, kill_group
from support.deployment import (
    COMPUTED,
    answer_500,
    at_step,
    before,
    history,
    interrupt,
    recoveries,
)
from support.disks import mounted

from trl_qurl.rollout import group
from trl_qurl.rollout.engine.served import ServedEngine
from trl_qurl.rollout.errors import ServerError, ServerLostError, SyncError
from trl_qurl.trainers.run_log import check_unused

# Tests that lose the server come last, because it takes long to start.
pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("faults")]


@pytest.fixture(scope="module")
def undisturbed(deployment):
    """The history of a run without a fault."""
    deployment.up()
    trainer = deployment.trainer()
    trainer.train()
    assert recoveries(trainer) == 0
    assert all(grad_norm > 0 for _, grad_norm, *_ in history(trainer)), (
        "there is nothing to compare"
    )
    assert all(value is not None for row in history(trainer)[1:] for value in row)
    return history(trainer)


def held_version(deployment):
    return ServedEngine(base_url=deployment.server.url).version()


def test_not_up_yet_is_waited_for(deployment, caplog):
    deployment.close()
    threading.Timer(3.0, deployment.start).start()
    trainer = deployment.trainer(vllm_server_timeout=240.0)
    waited = [text for text in caplog.messages if text.startswith("Waiting")]
    assert waited == [f"Waiting up to 240 seconds for the vLLM server at {deployment.server.url}."]
    trainer.train()
    assert trainer.state.global_step == 4


def test_hangs_too_long(deployment, monkeypatch):
    deployment.up()
    monkeypatch.setattr(group, "MAX_RECOVERIES", 0)
    trainer = deployment.trainer(vllm_request_timeout=10.0)
    trainer.add_callback(at_step(2, functools.partial(deployment.hang, 12.0)))
    started = time.monotonic()
    with pytest.raises(
        ServerError, match="did not answer /.* within 10 seconds: it hangs, or needs a larger vllm_"
    ):
        trainer.train()
    assert time.monotonic() - started < 60, "a hanging server was waited for again and again"
    deployment.up()
    deployment.trainer(max_steps=1).train()  # nothing of the broken run is in the way


@pytest.mark.parametrize("method", ["generate", "load_checkpoint"])
def test_hangs_for_a_while(deployment, undisturbed, method):
    deployment.up()
    trainer = deployment.trainer(vllm_request_timeout=2.0)
    client = trainer.vllm_generation.vllm_client
    trainer.add_callback(
        at_step(2, lambda: interrupt(client, method, functools.partial(deployment.hang, 3.0)))
    )
    trainer.train()
    assert recoveries(trainer) >= 1
    assert history(trainer) == undisturbed


def test_the_noise_follows_from_the_seed_and_the_step(deployment):
    """Each request is for one completion, so the order of arrival does not matter."""
    deployment.up()

    def sampled(trainer, step):
        trainer.state.global_step = step
        trainer.vllm_generation.sync_weights()
        client = trainer.vllm_generation.vllm_client
        first, second = (
            client.generate([[40, 41]], max_tokens=12)["completion_ids"] for _ in range(2)
        )
        assert first != second
        return first, second

    trainer = deployment.trainer(seed=1)
    other = deployment.trainer(seed=2)
    noise = [sampled(trainer, 3), sampled(trainer, 4), sampled(other, 3)]
    assert len({str(tokens) for tokens in noise}) == 3
    deployment.lose_and_wait()
    # Without a new seed, a server that has just started would repeat the noise of step 3.
    assert sampled(deployment.trainer(seed=1), 4) == noise[1], (
        "a server that was started again, or a resumed run"
    )


def test_two_trainers_on_one_server(deployment):
    deployment.up()
    first = deployment.trainer()
    second = deployment.trainer()
    first.add_callback(at_step(2, second.vllm_generation.sync_weights))
    first.vllm_generation.sync_weights()
    # The second's weights come between a sync of the first and the generation that relies on it.
    generation = first.vllm_generation
    generation.generate = before(generation.generate, second.vllm_generation.sync_weights)
    with pytest.raises(SyncError, match="another run uses it. Use one server per run"):
        first.train()
    second.train()  # the other continues


def test_full_disk(deployment, tmp_path):
    deployment.up()
    with mounted(tmp_path / "disk", "size=2m") as disk:
        trainer = deployment.trainer(rollout_checkpoint_dir=str(disk))

        def fill():
            with (disk / "others").open("wb") as file, pytest.raises(OSError):
                file.write(bytes(2**22))

        trainer.add_callback(at_step(2, fill))
        with pytest.raises(
            OSError, match="cannot be written .*No space left on device.*free space there"
        ):
            trainer.train()
        assert held_version(deployment).endswith("step1-sync2"), (
            "the server loaded a checkpoint that is not complete"
        )
        check_unused(Path(trainer.args.output_dir))  # the next run may train there
        left = {path.parent.name for path in disk.rglob("*.safetensors")}
        assert left == {"sync-2"}, "half a checkpoint was left where the server could read it"


def test_trainer_is_killed_during_a_sync(deployment):
    server = deployment.up()
    config = {
        **deployment.config(max_steps=40, save_strategy="steps", save_steps=1),
        "per_device_train_batch_size": 8,
    }
    directory = deployment.directory / "killed"
    others = {*deployment.rollouts.glob("*/[0-9]")}  # of other tests' trainers, not yet freed
    command = [deployment.python, SCENARIOS / "train.py", directory, "--model", deployment.model]
    command += ["--config", json.dumps(config)]
    trainer = subprocess.Popen(list(map(str, command)), env=child_environment(), process_group=0)
    try:
        deadline = time.monotonic() + 120
        while not (directory / "checkpoint-2" / "trainer_state.json").exists():
            assert time.monotonic() < deadline
            assert trainer.poll() is None
            time.sleep(0.01)
        seen = {path.name for path in deployment.rollouts.glob("*/*/sync-*")}
        while {path.name for path in deployment.rollouts.glob("*/*/*sync-*")} == seen:
            assert time.monotonic() < deadline
            assert trainer.poll() is None
    finally:
        kill_group(trainer)  # a checkpoint has just been begun
        while group_members(trainer.pid):  # a fork ends a moment after what stands in for it
            time.sleep(0.01)
    left = {*deployment.rollouts.glob("*/[0-9]")} - others
    assert left, "it was not killed in time: it had a chance to clean up"
    for path in left:
        (path / "left-behind").touch()
    resumed = deployment.trainer(max_steps=4)
    assert not list(deployment.rollouts.glob("*/*/left-behind")), (
        "the killed run's files are still in memory"
    )
    resumed.train(resume_from_checkpoint=str(directory / "checkpoint-2"))
    assert resumed.state.global_step == 4
    assert server.process.poll() is None
    assert held_version(deployment) == resumed.vllm_generation.sync.version


def test_restarts_with_old_weights(deployment, undisturbed):
    deployment.up()
    # only the sync after the recovery is checked
    trainer = deployment.trainer(sync_check_interval=0)
    # Between a sync and the generation that relies on it.
    generation = trainer.vllm_generation
    trainer.add_callback(
        at_step(2, lambda: interrupt(generation, "generate", deployment.lose_and_wait))
    )
    trainer.train()
    assert recoveries(trainer) == 1
    assert history(trainer) == undisturbed
    assert held_version(deployment) == generation.sync.version
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["sync/recoveries"] for row in rows] == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("method", "lose", "says"),
    [
        ("generate", "lose", "did not answer"),
        ("load_checkpoint", "lose", "did not answer"),
        ("load_checkpoint", "lose_engine", "The engine has died"),
    ],
)
def test_dies(deployment, undisturbed, method, lose, says, caplog):
    deployment.up()
    trainer = deployment.trainer()
    client = trainer.vllm_generation.vllm_client
    trainer.add_callback(at_step(2, lambda: interrupt(client, method, getattr(deployment, lose))))
    trainer.train()
    assert recoveries(trainer) == 1
    assert history(trainer) == undisturbed
    [said] = [text for text in caplog.messages if "Recovery 1 of at most 3" in text]
    assert f"server at {deployment.server.url} " in said
    assert says in said


def test_two_processes_recover_together(deployment, train, tmp_path):
    config = {name: value for name, value in deployment.config().items() if name != "max_steps"}
    arguments = [tmp_path, "--model", deployment.model, config, "--request-seed", "7"]
    server = deployment.up().process.pid
    undisturbed, disturbed = train(
        arguments, [*arguments, "--kill-before-generation", server], processes=2
    )
    assert disturbed["processes"] == 2
    rows = [
        [row for row in record["history"] if "loss" in row] for record in (undisturbed, disturbed)
    ]
    computed = [[[row.get(name) for name in COMPUTED] for row in run] for run in rows]
    assert computed[0] == computed[1]
    assert len(computed[0]) == 4
    assert [sum(row.get("sync/recoveries", 0) for row in run) for run in rows] == [0, 1]


def test_answers_500_three_times(deployment, undisturbed):
    deployment.up()
    failures = {}
    trainer = deployment.trainer()
    answer_500(trainer, failures)
    trainer.add_callback(
        at_step(1, lambda: failures.update({"/v1/completions": 2, "/collective_rpc": 1}))
    )
    trainer.train()
    assert failures == {"/v1/completions": 0, "/collective_rpc": 0}
    assert recoveries(trainer) == 3
    assert history(trainer) == undisturbed


def test_is_gone_for_good(deployment):
    server = deployment.up()
    trainer = deployment.trainer(vllm_server_timeout=3.0)
    trainer.add_callback(at_step(2, deployment.close))
    with pytest.raises(
        ServerLostError, match=f"No vLLM server answers at {server.url} after 3 s.*Before that: "
    ):
        trainer.train()
    assert trainer.state.global_step == 2
