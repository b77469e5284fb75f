"""A run one rollout ahead is a synchronous run delayed by one rollout, to the last digit; also
after faults.
"""

import functools
import json
import signal
import subprocess
import threading
import time
from concurrent.futures import wait

import pytest
import requests
from conftest import SCENARIOS, child_environment, kill_group
from datasets import Dataset
from delayed import delay, record_prompts
from support.building import KINDS
from support.deployment import answer_500, at_step, history, interrupt, recoveries
from tiny import tiny_tokenizer

from benchmarks.objectives import one_run
from trl_qurl.rollout.engine.http import add_key

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("ahead")]

AHEAD = {
    "rollouts_ahead": 1,
    "steps_per_generation": 2,
    "gradient_accumulation_steps": 1,
    "max_steps": 8,
    "top_k": 20,
}
ROLLOUTS = 4  # of two updates each
# for three rollouts: the fourth is in the second epoch
PROMPTS = [a + b for a in "abcd" for b in "ijk"]


def distinct(completions, **kwargs):
    return [len(set(completion)) / 8 for completion in completions]


def build(deployment, algorithm="GRPO", reward=distinct, output_dir="out", **settings):
    deployment.up()
    trainer_class, config = KINDS[algorithm]
    trainer = trainer_class(
        model=str(deployment.model),
        reward_funcs=reward,
        args=config(
            str(deployment.directory / output_dir), **deployment.config(**AHEAD | settings)
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS[:4]}),
        processing_class=tiny_tokenizer(),
    )
    # so that runs can be compared, as in `test_faults`
    trainer.vllm_generation.generation_kwargs["seed"] = 7
    return trainer


@pytest.fixture(scope="module")
def order(deployment):
    """The prompts of a synchronous run."""
    plain = build(deployment, rollouts_ahead=0)
    seen = record_prompts(plain)
    plain.train()
    assert len(seen) == ROLLOUTS
    return seen


@pytest.fixture(scope="module")
def delayed(deployment, order):
    """What a synchronous run computes that is delayed by one rollout, by algorithm, lost rollouts
    and settings.
    """

    @functools.cache
    def run(algorithm="GRPO", lost=(), **settings):
        trainer = build(deployment, algorithm, rollouts_ahead=0, **settings)
        delay(trainer, order, lost)
        trainer.train()
        assert all(grad_norm > 0 for _, grad_norm, *_ in history(trainer)), (
            "there is nothing to compare"
        )
        return history(trainer)

    return run


def staleness(trainer):
    rows = [row for row in trainer.state.log_history if "rollout/staleness" in row]
    return [row["rollout/staleness"] for row in rows]


@pytest.mark.parametrize("algorithm", ["GRPO", pytest.param("RLOO", marks=pytest.mark.slow), "PPO"])
def test_equals_a_synchronous_run_that_is_delayed(deployment, order, delayed, algorithm):
    ahead = build(deployment, algorithm)
    seen = record_prompts(ahead)
    ahead.train()
    assert seen == order
    assert history(ahead) == delayed(algorithm)
    assert staleness(ahead) == [0, 2, 2, 2]
    assert recoveries(ahead) == 0


@pytest.mark.slow
def test_the_study_of_objectives_is_delayed_in_the_same_way(deployment, delayed):
    study = build(deployment, rollouts_ahead=0, smooth_activations=False)  # which counts syncs
    one_run.delay(study.vllm_generation)
    study.train()
    assert history(study) == delayed("GRPO", smooth_activations=False)


def test_two_processes(deployment, train, tmp_path):
    deployment.up()
    same = [tmp_path, "--model", deployment.model, "--request-seed", "7"]
    # a smaller step, because the guard takes a delayed rollout of another policy for a fault
    config = deployment.config(**AHEAD, learning_rate=3e-4)
    synchronous = config | {"rollouts_ahead": 0}
    runs = [[*same, synchronous], [*same, synchronous, "--delayed"], [*same, config]]
    plain, delayed, ahead = train(*runs, processes=2)
    assert ahead["processes"] == 2

    def computed(run):
        rows = [row for row in run["history"] if "loss" in row]
        assert len(rows) == AHEAD["max_steps"]
        return [(row["loss"], row["grad_norm"]) for row in rows]

    assert computed(plain) != computed(delayed) == computed(ahead)


def test_evaluation_takes_no_rollout_away(deployment, delayed):
    # An evaluation draws from torch's generator, as TRL does to shuffle, and syncs once more, which
    # smoothing counts.
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "smooth_activations": False,
    }
    # which reads the engine's log-probabilities from its last answer
    ahead = build(deployment, "RLOO", **settings)
    ahead.train()
    assert sum("eval_loss" in row for row in ahead.state.log_history) == AHEAD["max_steps"]
    assert not any("eval_rollout/staleness" in row for row in ahead.state.log_history)
    assert history(ahead) == delayed("RLOO", **settings)


# inside a rollout, between two
@pytest.mark.parametrize("step", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_resumed_run_continues_with_the_rollout_that_was_out(deployment, delayed, step):
    settings = {
        "output_dir": f"saved-{step}",
        "save_strategy": "steps",
        "save_steps": step,
    }
    whole = build(deployment, **settings)
    whole.train()
    assert history(whole) == delayed(), "saving changed the run"
    checkpoint = f"{whole.args.output_dir}/checkpoint-{step}"
    resumed = build(deployment, **settings)
    seen = record_prompts(resumed)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert len(seen) == 2
    assert history(resumed) == history(whole)
    reordered = build(deployment, seed=1, output_dir="reordered")  # whose next prompts are others
    reordered.train(resume_from_checkpoint=checkpoint)
    assert staleness(reordered) == [0, 2, 0, 2]


def before_second(trainer, act):
    """Let `act` come just before the server is asked to begin the third rollout, the second one
    that it begins ahead, so that it is out when a step ends.
    """
    client = trainer.vllm_generation.vllm_client
    interrupt(client, "begin", lambda: interrupt(client, "begin", act))


def die(deployment, ahead):
    before_second(ahead, lambda: deployment.server.send(signal.SIGSTOP))
    ahead.add_callback(at_step(3, deployment.replace))


def restart_with_old_weights(deployment, ahead):
    """After the rollout has been answered."""

    def lose():
        wait([ahead.vllm_generation.vllm_client.begun.future])
        deployment.lose_and_wait()

    ahead.add_callback(at_step(3, lose))


def hang(deployment, ahead):
    before_second(ahead, functools.partial(deployment.hang, 3.0))


@pytest.mark.parametrize("fault", [die, restart_with_old_weights, hang])
def test_a_fault_while_a_rollout_is_out(deployment, delayed, fault):
    ahead = build(deployment, vllm_request_timeout=2.0 if fault is hang else 60.0)
    fault(deployment, ahead)
    ahead.train()
    assert recoveries(ahead) >= 1 if fault is hang else recoveries(ahead) == 1
    assert history(ahead) == delayed(lost=(2,))
    assert staleness(ahead) == [0, 2, 0, 2]


def test_hangs_until_a_second_after_the_trainer_wants_its_rollout(deployment, delayed):
    ahead = build(deployment)

    def freeze():
        deployment.server.send(signal.SIGSTOP)
        interrupt(ahead.vllm_generation, "collect", functools.partial(deployment.hang, 1.0))

    before_second(ahead, freeze)
    ahead.train()
    assert recoveries(ahead) == 0
    assert history(ahead) == delayed()
    [_, _, third, _] = [row for row in ahead.state.log_history if "rollout/staleness" in row]
    assert third["time/wait_for_rollout_s"] > 1.0
    assert third["time/generate_s"] > 1.0, "the server's own time is what was waited for"


def test_answers_500_while_a_rollout_is_out(deployment, delayed):
    failures = {}
    ahead = build(deployment)
    answer_500(ahead, failures)
    before_second(ahead, lambda: failures.update({"/v1/completions": 1}))
    ahead.train()
    assert failures == {"/v1/completions": 0}
    assert recoveries(ahead) == 1
    assert history(ahead) == delayed(lost=(2,))


def running_requests(deployment):
    text = requests.get(f"{deployment.server.url}/metrics", auth=add_key, timeout=60).text
    [line] = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
    return float(line.split()[-1])


def abort_all(deployment):
    """How many requests there were."""
    url = f"{deployment.server.url}/abort_requests"
    return requests.post(url, json={}, auth=add_key, timeout=60).json()["aborted"]


@pytest.mark.parametrize(
    "error", [RuntimeError, pytest.param(KeyboardInterrupt, marks=pytest.mark.slow)]
)
def test_an_error_leaves_neither_a_request_nor_a_thread(deployment, error):
    out = []

    def breaks(completions, **kwargs):
        out.append(ahead.vllm_generation.vllm_client.begun)
        if len(out) == 2:
            raise error("in a reward")
        return distinct(completions)

    failures = {"/abort_requests": 1}
    settings = {"max_completion_length": 56, "generation_kwargs": {"ignore_eos": True}}
    ahead = build(deployment, reward=breaks, **settings)
    answer_500(ahead, failures)
    # A request to a server that has stopped is out for certain, however busy the machine is.
    before_second(ahead, functools.partial(deployment.hang, 1.0))
    with pytest.raises(error, match="in a reward"):
        ahead.train()
    assert out[1].future.done()
    assert failures == {"/abort_requests": 0}
    for thread in threading.enumerate():
        if thread.name.endswith("(run)"):  # which has handed over an answer, and now ends
            thread.join(30)
            assert not thread.is_alive()
    assert abort_all(deployment) == 0
    ahead.train()  # nothing is in the way
    assert ahead.state.global_step == AHEAD["max_steps"]
    assert recoveries(ahead) == 0
    assert staleness(ahead)[-ROLLOUTS:] == [0, 2, 2, 2]


@pytest.mark.slow
def test_a_killed_trainer_is_in_nobodys_way(deployment):
    deployment.up()
    config = deployment.config(**AHEAD | {"max_steps": 100, "max_completion_length": 56})
    config = json.dumps(config | {"generation_kwargs": {"ignore_eos": True}})
    command = [deployment.python, SCENARIOS / "train.py", deployment.directory / "killed"]
    command += ["--model", deployment.model, "--config", config]
    trainer = subprocess.Popen(list(map(str, command)), env=child_environment(), process_group=0)
    try:
        deadline = time.monotonic() + 120
        while not running_requests(deployment):
            assert time.monotonic() < deadline
            assert trainer.poll() is None
    finally:
        kill_group(trainer)
    ahead = build(deployment)
    ahead.train()
    assert ahead.state.global_step == AHEAD["max_steps"]
